// A streaming resampler: windowed sinc, so that what lies above the lower Nyquist
// frequency is taken out before it can fold back. Used in both audio worklets.

const LOBES = 16;
const PHASES = 256;
const ROLL_OFF = 0.92;

export class Resampler {
  // Rates in Hz. The output lags the input by `LOBES` periods of the lower rate.
  constructor(fromRate, toRate) {
    this.step = fromRate / toRate;
    this.identity = fromRate === toRate;
    const cutoff = ROLL_OFF * Math.min(1, toRate / fromRate);
    this.half = Math.ceil(LOBES / Math.min(1, toRate / fromRate));
    this.taps = 2 * this.half;
    this.kernel = new Float32Array((PHASES + 1) * this.taps);
    for (let phase = 0; phase <= PHASES; phase += 1) {
      const row = phase * this.taps;
      let sum = 0;
      for (let tap = 0; tap < this.taps; tap += 1) {
        const x = tap - this.half + 1 - phase / PHASES;
        const sinc = x === 0 ? 1 : Math.sin(Math.PI * cutoff * x) / (Math.PI * cutoff * x);
        const at = Math.max(-1, Math.min(1, x / this.half));
        const window = 0.42 + 0.5 * Math.cos(Math.PI * at) + 0.08 * Math.cos(2 * Math.PI * at);
        this.kernel[row + tap] = sinc * window;
        sum += sinc * window;
      }
      for (let tap = 0; tap < this.taps; tap += 1) this.kernel[row + tap] /= sum;
    }
    this.held = new Float32Array(this.half - 1);
    this.position = this.half - 1;
  }

  // Samples in (Float32Array, any length), the samples that are ready out.
  push(input) {
    if (this.identity) return input.slice();
    const samples = new Float32Array(this.held.length + input.length);
    samples.set(this.held);
    samples.set(input, this.held.length);
    const last = samples.length - this.half - 1;
    const output = new Float32Array(Math.max(0, Math.floor((last - this.position) / this.step) + 1));
    let position = this.position;
    let count = 0;
    while (position <= last && count < output.length) {
      const whole = Math.floor(position);
      const row = Math.round((position - whole) * PHASES) * this.taps;
      const begin = whole - this.half + 1;
      let value = 0;
      for (let tap = 0; tap < this.taps; tap += 1) {
        value += samples[begin + tap] * this.kernel[row + tap];
      }
      output[count] = value;
      count += 1;
      position += this.step;
    }
    const keepFrom = Math.max(0, Math.min(samples.length, Math.floor(position) - this.half + 1));
    this.held = samples.slice(keepFrom);
    this.position = position - keepFrom;
    return count === output.length ? output : output.subarray(0, count);
  }
}
