"""Logs: one line per event, JSON for machines and text for people, without anybody's prompts."""
