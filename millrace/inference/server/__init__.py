"""HTTP over the engine: OpenAI's endpoints, tokens in and out, and the verbs of reinforcement learning."""
