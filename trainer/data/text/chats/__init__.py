"""Chats: their messages, the templates that render them, and what a template leaves out."""
