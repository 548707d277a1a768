"""A server as a peer begins it: OpenAI's text completions, two tokens an event, and llama.cpp's own route.

    python served_peer.py --port P [--owner vllm|llamacpp] [--spec KIND] [--k N] [--fault KIND]"""

import argparse
import http.server
import json
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--owner", default="vllm")
parser.add_argument("--spec", default="none")
parser.add_argument("--k", type=int, default=5)
parser.add_argument("--fault", default="")
asked, others = parser.parse_known_args()
print("loading the model", flush=True)
if asked.fault == "start":
    sys.exit("RuntimeError: out of memory")
counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            lines = [f"vllm:spec_decode_num_{name}_total {count}" for name, count in counts.items()]
            return self.whole("\n".join([*lines, ""]).encode(), "text/plain")
        told = {"id": json.dumps([sys.argv, dict(os.environ)]) if "--tell" in others else "model"}
        models = {"object": "list", "data": [told | {"object": "model", "owned_by": asked.owner}]}
        return self.whole(json.dumps(models).encode(), "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.fault == "die":
            os._exit(3)
        if asked.fault == "hang":
            time.sleep(60)
        if body["prompt"] == [666]:
            return self.whole(b'{"error": {"message": "bad luck"}}', "application/json", 400)
        if not body.get("stream"):
            one = {"index": 0, "text": "x", "finish_reason": "length"}
            return self.whole(json.dumps({"choices": [one], "usage": None}).encode(), "application/json")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        (self.llama if self.path == "/completion" else self.openai)(body)

    def openai(self, body):
        last, most = body["prompt"][-1], body["max_tokens"]
        tokens = [last + i for i in range(most)]
        for begin in range(0, most, 2):
            if begin:
                counts.update(drafts=counts["drafts"] + 1, draft_tokens=counts["draft_tokens"] + 3)
                counts["accepted_tokens"] += 1
            choice = {"index": 0, "text": "x", "token_ids": tokens[begin : begin + 2], "finish_reason": None}
            self.say({"choices": [choice]})
        end = {"index": 0, "text": "", "finish_reason": "length"}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": most}
        self.say({"choices": [end], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def llama(self, body):
        drafted = accepted = 0
        for i in range(body["n_predict"]):
            if asked.spec != "none" and i in (1, 4):
                drafted, accepted = drafted + asked.k, accepted + 2
            timings = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
            self.say({"content": "x", "tokens": [body["prompt"][-1] + i], "stop": False, "timings": timings})
        self.say({"content": "", "tokens": [], "stop": True})

    def say(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def whole(self, raw, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", asked.port), Handler).serve_forever()
