"""Records of calls and requests, and the metrics, logs, spans and captures that are made from them."""
