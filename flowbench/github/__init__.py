"""The comment bot: reads an artifact as hostile input, asks the API what it belongs to, renders, and keeps one comment."""
