"""OpenAI's Responses API, translated to chat requests, and chat answers translated back. Nothing is stored."""
