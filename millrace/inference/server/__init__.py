"""HTTP server of the engine: OpenAI's endpoints, token endpoints, and control endpoints for RL training."""
