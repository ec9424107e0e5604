"""Speaks the protocol of leanprover-community/repl, and knows no mathematics but ``rfl``."""

import json
import re
import sys
import time


def main():
    environments, block = 0, ""
    for line in sys.stdin:
        block += line
        if line.strip():
            continue
        command, block = json.loads(block), ""
        text = command["cmd"]
        if "hang" in text:
            time.sleep(60)
        if "crash" in text:
            sys.exit(1)
        messages = []
        if "import Nothing" in text:
            messages.append({"severity": "error", "data": "unknown module prefix 'Nothing'"})
        for body in re.findall(r":=\s*(?:by )?(\w+)", text):
            if body not in ("rfl", "choice", "cheat"):
                messages.append({"severity": "error", "data": "unsolved goals"})
        for name in re.findall(r"#print axioms (\S+)", text):
            depends = f"'{name}' does not depend on any axioms"
            if "choice" in text:
                depends = f"'{name}' depends on axioms: [propext,\n Classical.choice]"
            if "cheat" in text:
                depends = f"'{name}' depends on axioms: [propext, mine]"
            messages.append({"severity": "info", "data": depends})
        reply = {"messages": messages, "env": environments}
        if command.get("env") is None and "needs_header" in text:
            messages.append({"severity": "error", "data": "no header"})
        environments += 1
        print(json.dumps(reply, indent=1) + "\n", flush=True)


if __name__ == "__main__":
    main()
