"""OpenAI's Responses API as a translation: requests to those of chats, and chats' answers back. Nothing is stored."""
