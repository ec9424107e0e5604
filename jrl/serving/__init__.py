"""Serving a policy with ``sampling.engine``: OpenAI's API over HTTP, JetStream's over gRPC.

- ``worker``: an engine in a thread
- ``openai_requests``: JSON bodies to requests
- ``openai_replies``: updates to JSON replies
- ``http``: the HTTP endpoints
- ``server``: the HTTP server, from its socket to a graceful end
- ``jetstream_engine``: JetStream's engine interface
- ``jetstream``: JetStream's gRPC server
- ``launch``: from a run or checkpoint to a server
"""
