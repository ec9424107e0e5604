"""A judge for tests: a server on loopback whose replies, faults included, a function chooses."""

import contextlib
import http.server
import json
import threading


def reply_body(text, **fields):
    """A response of OpenAI's API with a text, and further fields of the choice."""
    choice = {"message": {"role": "assistant", "content": text}, **fields}
    return json.dumps({"choices": [choice]})


@contextlib.contextmanager
def judge_server(answer):
    """Runs a judge; yields (its address, the list of requests' bodies).

    Args:
      answer: (body, number of the request from 0) -> text of the verdict, or (status, headers,
        text of the response).
    """
    bodies, lock = [], threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["authorization"] = self.headers.get("Authorization")
            with lock:
                number = len(bodies)
                bodies.append(body)
            reply = answer(body, number)
            status, headers, text = (
                (200, {}, reply_body(reply)) if isinstance(reply, str) else reply
            )
            with contextlib.suppress(OSError):  # whoever asked may have gone
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
