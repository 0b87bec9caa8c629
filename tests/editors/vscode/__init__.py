"""The extension in a real VS Code, served to headless Chromium."""
