// What the page knows.

export const state = {
  connection: "not connected", // connecting, connected, reconnecting, disconnected
  session: null,
  microphone: "off", // asking, on, muted, unavailable
  userSpeaking: false,
  thinking: false,
  playing: false,
  response: null, // id of the response that is running
  dropped: null, // id of the response whose audio is no longer wanted
  interruptions: 0,
  lastTruncation: null, // {item_id, audio_end_ms}
  notice: null,
  noticeAbout: null, // answer, connection, microphone, server
  complaint: null, // what the server said of the last thing it refused
  inputLevel: 0,
  wantsMicrophone: false,
  createWhenFree: false,
  forgets: false, // the page shows a conversation that the next session does not know
  unsent: null, // what was typed before there was a connection
  defaultInstructions: "",
};
