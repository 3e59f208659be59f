// Bytes and times in words.

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let amount = bytes;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(amount) < 1024) return `${short(amount)} ${unit}`;
    amount /= 1024;
  }
  return `${short(amount)} GiB`;
}

function short(amount) {
  return Number(amount.toPrecision(Math.abs(amount) < 1000 ? 3 : 4));
}

// Seconds in at most two units.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (Math.abs(seconds) < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// The value of a member, by what its name says that it is.
export function inUnits(name, value) {
  if (value === null || value === undefined) return "–";
  if (name.endsWith("_s") && typeof value === "number") return duration(value);
  if (name.endsWith("_ms") && typeof value === "number") return `${Math.round(value)} ms`;
  if (name.endsWith("bytes") && typeof value === "number") return size(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function title(name) {
  return name.replace(/_(s|ms)$/, "").replaceAll("_", " ");
}
