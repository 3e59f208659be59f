// Microphone -> PCM16 at 24 kHz in pieces of 20 ms.
// Posts {pcm: ArrayBuffer, level: RMS 0..1} for each piece.

import { Resampler } from "./resampler.js";

const RATE_HZ = 24000;
const PIECE = RATE_HZ / 50;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = new Resampler(sampleRate, RATE_HZ);
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
    this.squares = 0;
    this.open = true;
    this.port.onmessage = () => {
      this.open = false;
    };
  }

  process(inputs) {
    const channels = inputs[0];
    if (!this.open || channels.length === 0) return this.open;
    let mono = channels[0];
    if (channels.length > 1) {
      mono = new Float32Array(mono.length);
      for (const channel of channels) {
        for (let i = 0; i < mono.length; i += 1) mono[i] += channel[i] / channels.length;
      }
    }
    for (const sample of this.resampler.push(mono)) this.take(sample);
    return true;
  }

  take(sample) {
    const clipped = Math.max(-1, Math.min(1, sample));
    this.squares += clipped * clipped;
    this.piece[this.filled] = Math.round(clipped * 32767);
    this.filled += 1;
    if (this.filled < PIECE) return;
    const message = { pcm: this.piece.buffer, level: Math.sqrt(this.squares / PIECE) };
    this.port.postMessage(message, [message.pcm]);
    this.piece = new Int16Array(PIECE);
    this.filled = 0;
    this.squares = 0;
  }
}

registerProcessor("capture", Capture);
