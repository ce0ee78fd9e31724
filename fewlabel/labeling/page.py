"""The labeling page: what a browser may ask of a session. `report.loopback` lets only this machine's user in."""

import io
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fewlabel.core.errors import BadInput
from fewlabel.data.pictures import Unreadable
from fewlabel.labeling.session import Session
from fewlabel.report.loopback import Request, Response

FILES = {
    "/": ("label.html", "text/html; charset=utf-8"),
    "/label.js": ("label.js", "text/javascript; charset=utf-8"),
    "/label.css": ("label.css", "text/css; charset=utf-8"),
}
METHODS = ("GET", "POST")
MAX_BODY = 1 << 12  # bytes of an answer


def answer_for(session: Session) -> Callable[[Request], Response]:
    """Return what answers a browser's requests about a session."""

    def answer(request: Request) -> Response:
        if request.method == "POST":
            return post(session, request)
        if request.path in FILES:
            name, kind = FILES[request.path]
            return Response(200, kind, files("fewlabel.labeling").joinpath(name).read_bytes())
        _, what, *rest = request.path.split("/")
        if what == "state" and not rest:
            return Response.json(session.state())
        if len(rest) != 1 or what not in ("image", "about", "opinion"):
            return Response.text("there is no such page", 404)
        image = whole(rest[0])
        if what == "opinion":
            return Response.json(session.opinion(image))
        try:
            return Response.json(session.about(image)) if what == "about" else picture(session, image, request)
        except Unreadable as error:
            return Response.text(f"this image cannot be read: {error}", 422)

    return answer


def post(session: Session, request: Request) -> Response:
    """Write what a person answered or took back. The reply comes after the disk has it."""
    if request.path == "/undo":
        return Response.json({"image": session.undo(), "state": session.state()})
    if request.path != "/answer":
        return Response.text("there is no such page", 404)
    try:
        given = json.loads(request.body)
        what = int(given["image"]), str(given["note"]), str(given["label"]), float(given["seconds"])
    except (ValueError, KeyError, TypeError):
        raise BadInput("an answer has image, note, label and seconds") from None
    session.answer(*what)
    return Response.json(session.state())


def picture(session: Session, image: int, request: Request) -> Response:
    """Return an image as PNG, with the contrast that the page asks for."""
    from PIL import Image

    low, high = (number(request.query.get(name)) for name in ("low", "high"))
    shown = session.values(session.checked(image)).shown(low, high)
    written = io.BytesIO()
    Image.fromarray(shown).save(written, "PNG", compress_level=1)
    return Response(200, "image/png", written.getvalue())


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise BadInput(f"images are numbered from 0, found '{text[:40]}'")
    return int(text)


def number(text: str | None) -> Any:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise BadInput(f"low and high are numbers, found '{text}'") from None
