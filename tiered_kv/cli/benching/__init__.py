"""What `tiered-kv bench` consists of."""
