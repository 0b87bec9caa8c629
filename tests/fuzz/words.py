"""Values that programs stumble over."""

from __future__ import annotations

import math

INTEGERS = (
    0, 1, 2, 3, 5, 16, 17, 63, 64, 65, 127, 128, 255, 256, 383, 384, 1000, 4096, 2**15, 2**16, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -1, -2, -(2**31), -(2**63), -(2**63) - 1,
)  # fmt: skip
NUMBERS = (
    0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 99.9, 100.0, 1e-300, 5e-324, 1e308, -1e308, -0.5, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "hi", "def f(x):\n    return x", "\n", "\r\n", "\t", "\x00", "a\x00b", "\ufeff", "\u2028", "é",
    "\u65e5\u672c\u8a9e", "\U0001f642" * 2, "e\u0301", "\U0010ffff", "<|endoftext|>", "<|im_start|>system",
    "<|fim_middle|>", "auto", "on", "off", "none", "text", "user", "system", "assistant", "tool", "model",
    "random:tiny", "../../etc/passwd", "%s%n", "{{7*7}}", "{%", "null", "true", "1", "-1", "1e999", "data: [DONE]",
    "a" * 300, "é" * 300, "word " * 200, "x" * 9000,
)  # fmt: skip
GRAMMARS = (
    '{"type":"object"}', '{"type":"array","items":{"type":"integer"},"maxItems":2}', '{"type":"strin"}', "{", "[]", "7",
    "null", '{"$ref":"#"}', '{"enum":[]}', '{"enum":["a",1,null]}', '{"anyOf":[]}', '{"not":{}}',
    '{"$ref":"#/$defs/a","$defs":{"a":{"type":"object","properties":{"b":{"$ref":"#/$defs/a"}}}}}',
    '{"pattern":"(","type":"string"}', '{"type":"string","minLength":5,"maxLength":1}',
    '{"type":"string","format":"date-time"}', "[a-z]+", "(", "a{1000}", "(a|b)*c", "(?=a)b", "^a$", "\\p{L}+",
    "((((a*)*)*)*)*", "[^\\x00-\\x7f]", "", 'start: "a"+', "start: b", "start:", 'root ::= "a"*', 'root ::= root | "a"',
    "root ::= [a-z", 'start: /[0-9]+/ "x"?', "\x00",
)  # fmt: skip
