"""The engine: takes requests, runs steps, says what happened."""
