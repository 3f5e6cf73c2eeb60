"""OpenAI's HTTP: requests read and validated, answers and events written."""
