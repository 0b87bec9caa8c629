"""Load on a server: requests and their records, arrival processes, and the figures made from them."""
