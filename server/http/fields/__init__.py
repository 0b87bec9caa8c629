"""Fields of bodies that several dialects share: their readers, and their JSON schemas."""
