// Sound in and out of the page. Rates: 24 kHz wherever the browser allows it.

const RATE_HZ = 24000;
const HERE = new URL(".", import.meta.url);

function context() {
  try {
    return new AudioContext({ sampleRate: RATE_HZ, latencyHint: "interactive" });
  } catch {
    return new AudioContext({ latencyHint: "interactive" });
  }
}

// Why there is no microphone, in words for a person; null when there may be one.
export function whyNoMicrophone() {
  if (!window.isSecureContext) {
    return (
      "This page is not secure, so the browser gives it neither microphone nor sound. " +
      "Open it by https, or on the machine itself as http://localhost."
    );
  }
  if (!navigator.mediaDevices?.getUserMedia) return "This browser has no access to microphones.";
  if (typeof AudioWorkletNode === "undefined") return "This browser is too old to record sound.";
  return null;
}

function refusal(problem) {
  const words = {
    NotAllowedError: "The microphone is blocked. Allow it for this page in the browser's settings.",
    NotFoundError: "No microphone was found. Connect one and press Talk again.",
    NotReadableError: "The microphone is in use by another program.",
  }[problem.name];
  return words ?? `The microphone cannot be used: ${problem.message}`;
}

export class Microphone {
  // onPiece(pcm: ArrayBuffer of PCM16 at 24 kHz, 20 ms; level: RMS 0..1), onEnd(words).
  constructor({ onPiece, onEnd }) {
    this.onPiece = onPiece;
    this.onEnd = onEnd;
    this.stream = null;
    this.context = null;
    this.node = null;
    this.muted = false;
    this.starting = false; // the person is being asked, or recording is about to begin
  }

  get on() {
    return this.stream !== null;
  }

  // Rejects with an Error whose message is for a person; nothing is left open then.
  async start() {
    const why = whyNoMicrophone();
    if (why !== null) throw new Error(why);
    this.starting = true;
    try {
      await this.#open();
    } catch (problem) {
      this.stop();
      throw problem;
    } finally {
      this.starting = false;
    }
  }

  async #open() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
    } catch (problem) {
      throw new Error(refusal(problem));
    }
    this.stream = stream;
    this.mute(this.muted);
    stream.getAudioTracks()[0].onended = () => {
      this.stop();
      this.onEnd("The microphone was taken away.");
    };
    try {
      await this.#record(context());
    } catch {
      // Some browsers record only at the microphone's own rate; the worklet resamples then.
      await this.context?.close();
      await this.#record(new AudioContext({ latencyHint: "interactive" }));
    }
  }

  async #record(audio) {
    this.context = audio;
    const source = audio.createMediaStreamSource(this.stream);
    await audio.audioWorklet.addModule(new URL("capture-worklet.js", HERE));
    this.node = new AudioWorkletNode(audio, "capture", { numberOfOutputs: 0 });
    this.node.port.onmessage = ({ data }) => this.onPiece(data.pcm, data.level);
    source.connect(this.node);
    await audio.resume();
  }

  mute(muted) {
    this.muted = muted;
    for (const track of this.stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  stop() {
    if (this.node !== null) {
      this.node.port.onmessage = null;
      this.node.port.postMessage("stop");
    }
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.context?.close();
    this.stream = null;
    this.context = null;
    this.node = null;
  }
}

export class Speaker {
  // onHeard(item, at: performance time in ms), onPlayed(item, samples, waiting), onEmpty().
  constructor({ onHeard, onPlayed, onEmpty }) {
    this.onHeard = onHeard;
    this.onPlayed = onPlayed;
    this.onEmpty = onEmpty;
    this.context = null;
    this.node = null;
    this.flushes = [];
    this.starting = null;
    this.droppedSamples = 0;
  }

  // Whether what is given to `play` is played.
  get ready() {
    return this.node !== null;
  }

  // Must be called from a click or a key the first time: browsers keep silent otherwise.
  // Rejects with an Error whose message is for a person.
  async start() {
    this.starting ??= this.#build();
    await this.starting;
    if (this.context.state !== "running") await this.context.resume();
  }

  async #build() {
    if (!window.isSecureContext) throw new Error(whyNoMicrophone());
    if (typeof AudioWorkletNode === "undefined") throw new Error("This browser is too old to play sound.");
    this.context = context();
    await this.context.audioWorklet.addModule(new URL("playback-worklet.js", HERE));
    this.node = new AudioWorkletNode(this.context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [1],
    });
    this.node.port.onmessage = ({ data }) => this.#take(data);
    this.analyser = new AnalyserNode(this.context, { fftSize: 2048 });
    this.window = new Float32Array(this.analyser.fftSize);
    this.node.connect(this.analyser);
    this.analyser.connect(this.context.destination);
  }

  #take(data) {
    if (data.type === "heard") {
      const audio = this.context;
      const latency = audio.outputLatency || audio.baseLatency || 0;
      const inSeconds = data.at - audio.currentTime + latency;
      this.onHeard(data.item, performance.now() + inSeconds * 1000);
    } else if (data.type === "played") {
      this.onPlayed(data.item, data.played, data.waiting);
    } else if (data.type === "empty") {
      this.onEmpty();
    } else if (data.type === "flushed") {
      this.flushes.shift()?.(data);
    } else if (data.type === "dropped") {
      this.droppedSamples += data.samples;
    }
  }

  play(item, pcm) {
    this.node?.port.postMessage({ type: "play", item, pcm }, [pcm]);
  }

  // Stops at once. Resolves to {item, played, waiting}; `item` is null when nothing was played.
  flush() {
    if (this.node === null) return Promise.resolve({ item: null, played: 0, waiting: false });
    return new Promise((resolve) => {
      this.flushes.push(resolve);
      this.node.port.postMessage({ type: "flush" });
    });
  }

  // RMS (0..1) of the last 2048 samples that left the page.
  energy() {
    if (this.node === null) return 0;
    this.analyser.getFloatTimeDomainData(this.window);
    let squares = 0;
    for (const sample of this.window) squares += sample * sample;
    return Math.sqrt(squares / this.window.length);
  }
}
