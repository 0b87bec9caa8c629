"""Rules that end a text by its layout, character by character, so that they cut alike however it is cut into tokens."""
