"""OpenAI's API as a protocol: reads and validates requests, edits answers and events."""
