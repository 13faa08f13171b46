"""The OpenAI-compatible HTTP server: requests in, text out. It knows no tensors."""
