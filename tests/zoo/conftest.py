"""A tokenizer with chat templates, in the file format of checkpoints."""

from chat_templates import chat_tokenizer  # noqa: F401
