"""One model computed by several processes, each with its share of the weights and of the KV heads."""
