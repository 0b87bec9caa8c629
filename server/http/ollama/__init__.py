"""Ollama's dialect: /api/generate, /api/chat, and what its clients ask about models."""
