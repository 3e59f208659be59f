// Plays PCM16 at 24 kHz without gaps and knows what was really played of each item.
//
// In:  {type: "play", item, pcm: ArrayBuffer}   append to what is to be played
//      {type: "flush"}                          stop now, forget the rest
// Out: {type: "heard", item, at}                first audible sample of an item (context time)
//      {type: "played", item, played, waiting}  samples of the item played; samples still waiting
//      {type: "empty"}                          everything has been played
//      {type: "flushed", item, played, waiting} answer to flush: the item that was playing (or
//                                               null), how many of its samples were played, and
//                                               whether any were still to be played
//      {type: "dropped", item, samples}         the ring is full (5 minutes); the newest is lost
// All counts are samples at 24 kHz.

import { Resampler } from "./resampler.js";

const RATE_HZ = 24000;
const RING_SECONDS = 300;
const FADE = 96;
const AUDIBLE = 0.003;
const REPORT_EVERY = Math.round(sampleRate / 20);

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = [];
    this.waiting = 0;
    this.item = null;
    this.played = 0;
    this.heard = false;
    this.sinceReport = 0;
    this.resampler = null;
    this.resampledItem = null;
    this.tail = null;
    this.port.onmessage = ({ data }) => {
      if (data.type === "play") this.append(data.item, new Int16Array(data.pcm));
      else this.flush();
    };
  }

  append(item, pcm) {
    if (this.waiting + pcm.length > RING_SECONDS * sampleRate) {
      this.port.postMessage({ type: "dropped", item, samples: pcm.length });
      return;
    }
    let samples = new Float32Array(pcm.length);
    for (let i = 0; i < pcm.length; i += 1) samples[i] = pcm[i] / 32768;
    if (sampleRate !== RATE_HZ) {
      if (this.resampledItem !== item) {
        this.resampler = new Resampler(RATE_HZ, sampleRate);
        this.resampledItem = item;
      }
      samples = this.resampler.push(samples);
    }
    if (samples.length === 0) return;
    this.queue.push({ item, samples, next: 0 });
    this.waiting += samples.length;
  }

  flush() {
    const head = this.queue[0];
    const item = head ? head.item : this.item;
    const before = item === this.item ? this.played : 0;
    // A few milliseconds of fade keep the cut from clicking; they are played, and counted.
    this.tail = this.fadeOut(item);
    this.port.postMessage({
      type: "flushed",
      item,
      played: this.inSourceSamples(before + this.tail.length),
      waiting: this.waiting > 0,
    });
    this.queue = [];
    this.waiting = 0;
    this.item = null;
  }

  fadeOut(item) {
    const tail = new Float32Array(FADE);
    let filled = 0;
    for (const { item: owner, samples, next } of this.queue) {
      if (owner !== item) break;
      for (let i = next; i < samples.length && filled < FADE; i += 1) {
        tail[filled] = samples[i] * (1 - filled / FADE);
        filled += 1;
      }
    }
    return tail.subarray(0, filled);
  }

  inSourceSamples(frames) {
    return Math.floor((frames * RATE_HZ) / sampleRate);
  }

  process(inputs, outputs) {
    const output = outputs[0][0];
    let filled = 0;
    if (this.tail !== null) {
      const part = this.tail.subarray(0, output.length);
      output.set(part);
      filled = part.length;
      this.tail = this.tail.length > output.length ? this.tail.subarray(filled) : null;
    }
    const wasWaiting = this.waiting > 0;
    while (filled < output.length && this.queue.length > 0) {
      const head = this.queue[0];
      if (head.item !== this.item) this.begin(head.item);
      const count = Math.min(output.length - filled, head.samples.length - head.next);
      const part = head.samples.subarray(head.next, head.next + count);
      output.set(part, filled);
      if (!this.heard) this.listen(part, filled);
      filled += count;
      head.next += count;
      this.played += count;
      this.waiting -= count;
      if (head.next === head.samples.length) this.queue.shift();
    }
    this.sinceReport += output.length;
    if (wasWaiting && (this.sinceReport >= REPORT_EVERY || this.waiting === 0)) this.report();
    if (wasWaiting && this.waiting === 0) this.port.postMessage({ type: "empty" });
    for (const channel of outputs[0].slice(1)) channel.set(output);
    return true;
  }

  begin(item) {
    if (this.item !== null) this.report();
    this.item = item;
    this.played = 0;
    this.heard = false;
  }

  listen(part, offset) {
    const index = part.findIndex((sample) => Math.abs(sample) >= AUDIBLE);
    if (index < 0) return;
    this.heard = true;
    const at = currentTime + (offset + index) / sampleRate;
    this.port.postMessage({ type: "heard", item: this.item, at });
  }

  report() {
    this.sinceReport = 0;
    this.port.postMessage({
      type: "played",
      item: this.item,
      played: this.inSourceSamples(this.played),
      waiting: this.inSourceSamples(this.waiting),
    });
  }
}

registerProcessor("playback", Playback);
