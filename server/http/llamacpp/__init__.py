"""llama.cpp's dialect: /infill, /completion, /props, /tokenize, /detokenize, /health."""
