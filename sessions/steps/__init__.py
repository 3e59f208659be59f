"""Step loops: worlds (actions in, frames out) and robots (observation in, actions out)."""
