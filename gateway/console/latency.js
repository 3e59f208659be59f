// Latency of turns as this page sees it. Times are performance.now() in ms.
// The end of a spoken turn is the last 20 ms piece from the microphone that was louder
// than the room; of a typed one, the moment at which it was sent.

const QUIETEST_SPEECH = 0.006;
const ABOVE_ROOM = 3;
const KEPT_TURNS = 6;

export class EndOfSpeech {
  constructor() {
    this.room = QUIETEST_SPEECH / ABOVE_ROOM;
    this.at = null;
  }

  // A piece with this level (RMS) has just been recorded.
  hear(level, now) {
    this.room = level < this.room ? 0.7 * this.room + 0.3 * level : Math.min(0.05, this.room * 1.002);
    if (level > Math.max(QUIETEST_SPEECH, ABOVE_ROOM * this.room)) this.at = now;
  }
}

export class Turns {
  constructor() {
    this.list = [];
    this.count = 0;
    this.end = null;
  }

  endOfTurn(at) {
    this.end = at;
  }

  begin(response) {
    this.count += 1;
    const turn = {
      number: this.count,
      response,
      end: this.end,
      ttft: null,
      ttfp: null,
      heard: null,
      audible: false,
      status: "in progress",
    };
    this.end = null;
    this.list.push(turn);
    if (this.list.length > KEPT_TURNS) this.list.shift();
  }

  of(response) {
    return this.list.find((turn) => turn.response === response);
  }

  // The first sound of a response has left the page.
  heard(response, now) {
    const turn = this.of(response);
    if (turn) turn.audible = true;
    this.mark(response, "heard", now);
  }

  // The first time that `figure` (ttft, ttfp or heard) happens to a response.
  mark(response, figure, now) {
    const turn = this.of(response);
    if (turn && turn[figure] === null && turn.end !== null) turn[figure] = Math.round(now - turn.end);
  }

  finish(response, status) {
    const turn = this.of(response);
    if (turn) turn.status = status;
  }
}
