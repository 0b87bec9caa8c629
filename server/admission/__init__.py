"""What may be asked of the engine now: limits of keys, room in the queue, deadlines that can be kept."""
