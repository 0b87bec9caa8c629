"""DeepSeek's dialect: /beta/completions."""
