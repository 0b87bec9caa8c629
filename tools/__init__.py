"""Tools for those who work on specdec; nothing here is installed."""
