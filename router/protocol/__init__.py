"""OpenAI's protocol: reads and validates requests, edits answers and events."""
