"""Serving a policy with ``sampling.engine``: OpenAI's API over HTTP.

JetStream's interface and its gRPC server are in ``jrl.zoo.jetstream``.

- ``worker``: an engine in a thread
- ``openai_requests``, ``openai_tools``, ``openai_formats``: JSON bodies to requests
- ``api_error``: error replies
- ``openai_replies``: updates to JSON replies
- ``http``: the HTTP endpoints
- ``server``: the HTTP server, from its socket to a graceful end
- ``launch``: from a run or checkpoint to a server
"""
