"""What the front end costs: an engine that does nothing but keep a schedule, and clients that read the time."""
