# ruff: noqa: E501
"""Programs that try to pass tests without solving them, or to do harm; none may pass."""

PROGRAMS = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork and stay": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('4')\nos._exit(3)",
    "daemon with the pipe": (
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        time.sleep(60)\n"
    ),
    "threads": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,)).start()"
    ),
    "memory": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "memory of children": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(1 << 28)\n        x[::4096] = b'x' * len(x[::4096])\n        time.sleep(9)\n"
        "time.sleep(9)"
    ),
    "endless loop": "while True:\n    pass",
    "endless output": "while True:\n    print('4')",
    "endless errors": "import sys\nwhile True:\n    print('4' * 1000, file=sys.stderr)",
    "sleep": "import time\ntime.sleep(1000)",
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "kill all": "import os\nos.kill(-1, 9)",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stop the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "ignore the end": (
        "import signal\nfor s in (1, 2, 3, 13, 14, 15):\n    signal.signal(s, signal.SIG_IGN)\n"
        "while True:\n    pass"
    ),
    "marks of the driver": (
        "import json\nfor _ in range(9):\n    print(json.dumps({'how': 'ok', 'text': '4'}))"
    ),
    "marks on every descriptor": (
        "import os\nfor fd in range(64):\n    try:\n"
        '        os.write(fd, b\'{"how": "ok", "text": ""}\\n\')\n    except OSError:\n        pass\n'
        "os._exit(0)"
    ),
    "marks on the parent's descriptors": (
        "import os\nfor pid in os.listdir('/proc'):\n    for fd in range(9):\n        try:\n"
        "            with open(f'/proc/{pid}/fd/{fd}', 'w') as f:\n"
        '                f.write(\'{"how": "ok", "text": ""}\\n\' * 9)\n'
        "        except OSError:\n            pass\nos._exit(0)"
    ),
    "reads the driver's frames": (
        "import sys\nframe = sys._getframe()\ntexts = []\nwhile frame:\n"
        "    texts += [str(frame.f_locals), str(frame.f_globals)]\n    frame = frame.f_back\n"
        "print(''.join(texts)[:100000])"
    ),
    "reads all memory for the answer": (
        "import gc, re\ntext = ''.join(map(repr, gc.get_objects()[:20000]))[:50000]\n"
        "print(re.findall(r'expected|outputs', text))"
    ),
    "all is equal": (
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
        "    __str__ = __repr__ = lambda s: '4'\n    __hash__ = None\n"
        "def double(x):\n    return Any(5)"
    ),
    "no asserts": (
        "import builtins\nbuiltins.AssertionError = builtins.exec = builtins.eval = print\n"
        "builtins.compile = lambda *a: None\ndef double(x):\n    return 5"
    ),
    "another exit": "import os\nos._exit = lambda code: None\ndef double(x):\n    return 5",
    "another write": (
        "import os\nos.write = lambda fd, data: len(data)\ndef double(x):\n    return 5"
    ),
    "deletes files": (
        "import os, shutil\nfor d in ('/tmp', '/var/tmp', '/home', '/root', '.', '/work'):\n"
        "    shutil.rmtree(d, ignore_errors=True)"
    ),
    "fills the disk": (
        "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))\n    i += 1"
    ),
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
    "deep": "def f(n):\n    return f(n + 1)\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf(0)",
    "bad code": "print('4'",
    "null bytes": "print('4')\0",
    "huge number": "print(10 ** 10 ** 9)",
    "unterminated thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "surrogates": "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe' * 1000)",
}
