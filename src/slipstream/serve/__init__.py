"""An OpenAI-compatible HTTP server on top of the engine. See docs/serving.md.

``worker`` has the one thread that steps the engine; ``service`` is its other end on the event loop, where requests
begin, tokens come in and requests end; ``api`` turns HTTP into requests and answers into HTTP.
"""
