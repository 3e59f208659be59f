// The state of the page in words: [name, words, what a screen reader is told].

export function inWords(state) {
  switch (state.connection) {
    case "connecting":
      return ["connecting", "Connecting …", "Connecting"];
    case "reconnecting":
      return ["connecting", "Connection lost, reconnecting …", "Reconnecting"];
    case "disconnected":
      return ["disconnected", "Disconnected", "Disconnected"];
    case "not connected":
      return ["idle", "Not connected", "Not connected"];
  }
  const told = {
    on: "Connected, microphone on",
    muted: "Connected, microphone muted",
    asking: "Connected, waiting for the microphone",
  }[state.microphone] ?? "Connected";
  if (state.microphone === "asking") return ["asking", "Allow the microphone …", told];
  if (state.userSpeaking) return ["hearing", "You are speaking", told];
  if (state.playing) return ["answering", "Answering", told];
  if (state.thinking || state.response !== null) return ["thinking", "Thinking …", told];
  if (state.microphone === "muted") return ["muted", "Connected, microphone muted", told];
  if (state.microphone === "on") return ["listening", "Listening", told];
  return ["connected", "Connected", told];
}
