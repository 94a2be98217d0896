"""The image files of samples: decode them, and make the small pictures that people see of them.

`load_image` gives the pixels that a model reads (stages/images.py). A thumbnail has the same pixels, scaled, in a new
file: nothing of the original file but its picture reaches a page.
"""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from penstock.storage.blobs import read_blob
from penstock.storage.errors import DataError, PenstockError, check_rules
from penstock.storage.file_store import FileStore

# Other formats of Pillow are refused: EPS starts another program, and many are rarely tested decoders.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_BYTES = 64 << 20  # of an image file
MAX_SOURCE_PIXELS = 1 << 26  # 8192 x 8192, 192 MiB in memory; a larger image is refused as a decompression bomb
_PIXEL_LIMIT = (
    f"at most {MAX_SOURCE_PIXELS} are decoded (8192 x 8192), since a small file may hold a decompression bomb: "
    "reduce it"
)
MAX_ASPECT_RATIO = 200  # of the Qwen processors
_ORIENTATION = 0x0112  # EXIF tag
_HIGH_BYTE = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of 16-bit grey
THUMBNAIL_SIDE = 160  # pixels
MAX_PICTURES_BYTES = 4 << 20  # of the thumbnails of one page
PICTURES_SECONDS = 10.0  # for the thumbnails of one page; a run has 30 seconds for its report


# ---- decoding --------------------------------------------------------------------------------------------------------


def load_image(data: bytes) -> np.ndarray:  # [H, W, 3] uint8
    """Decode an image file to RGB. Raises DataError, whose message begins with "the image".

    The EXIF orientation is applied. Transparent pixels are composed over white. Palettes, grey, CMYK and YCbCr are
    converted; 16-bit values keep their high byte. Refused are animations and files of several pages (but of the
    pictures in a camera's MPO file the first one is read), floating-point pixels, truncated and damaged files, files
    of more than MAX_BYTES, and images of more than MAX_SOURCE_PIXELS pixels, which are not decoded.
    """
    rules = [
        (not data, "the image has no bytes: restore it"),
        (
            len(data) > MAX_BYTES,
            f"the image has {len(data) >> 20} MiB; {MAX_BYTES >> 20} are allowed: reduce it",
        ),
    ]
    check_rules(rules, DataError)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_rules(_rules_before_decoding(image), DataError)
            image.load()
            return _to_rgb(image)
    except DataError:
        raise
    except Exception as error:  # the decoders of Pillow raise many types for damaged files
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        problem = f"cannot be decoded ({reason}): restore or remove it"
        if isinstance(error, Image.DecompressionBombError):
            problem = f"has more than twice Pillow's limit of pixels, but {_PIXEL_LIMIT}"
        elif isinstance(error, UnidentifiedImageError):
            problem = f"is none of {', '.join(FORMATS)} (it begins with {data[:8]!r}): convert it to PNG or JPEG"
        raise DataError(f"the image {problem}") from None


def _rules_before_decoding(image: Image.Image) -> Iterator[tuple[object, str]]:
    width, height = image.size
    size = f"the image has {width} x {height} pixels"
    yield width * height > MAX_SOURCE_PIXELS, f"{size}, but {_PIXEL_LIMIT}"
    yield (
        max(width, height) > MAX_ASPECT_RATIO * min(width, height),
        f"{size}; one side may be at most {MAX_ASPECT_RATIO} times the other: crop it",
    )
    num_frames = getattr(image, "n_frames", 1)  # Pillow reads the whole file for it, so it comes last
    yield (
        num_frames > 1 and image.format != "MPO",
        f"the image has {num_frames} frames or pages; one is needed: save the one that is meant",
    )


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Return a decoded image as [H, W, 3] uint8, upright, over white."""
    try:
        has_orientation = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    except Exception:  # damaged metadata do not make the pixels unreadable
        has_orientation = False
    image = ImageOps.exif_transpose(image) if has_orientation else image
    key = image.info.get("transparency")  # a PNG file's transparent colour, with the bits of its channels
    if image.mode == "RGB" and isinstance(key, tuple) and max(key) > 0xFF:
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if image.mode in (*_HIGH_BYTE, "I", "F"):
        values = np.asarray(image)
        # Pillow decodes the 16-bit values of PPM and TIFF files to mode I, which has 32 bits
        if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            kind = "floating-point" if image.mode == "F" else "32-bit"
            raise DataError(f"the image has {kind} pixels: save it with 8 bits per channel")
        image = Image.fromarray((values >> 8).astype(np.uint8))
        image.info |= {"transparency": key >> 8} if isinstance(key, int) else {}
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


# ---- thumbnails ------------------------------------------------------------------------------------------------------


def make_thumbnail(store: FileStore, digest: str) -> tuple[str, bytes]:
    """Return a picture of the image `digest` of a sample, of at most THUMBNAIL_SIDE pixels a side: (MIME type, file).
    It is a PNG file if it has few colours, else a JPEG file. Raises DataError or StoreError."""
    if not re.fullmatch("[0-9a-f]{64}", digest):  # a shard may have been written by others
        raise DataError(f"{digest[:80]!r} is not the name of an image: restore the shard that has it")
    image = Image.fromarray(load_image(read_blob(store, digest)))
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file, kind = io.BytesIO(), "JPEG" if image.getcolors() is None else "PNG"  # None: more than 256 colours
    image.save(file, kind, optimize=True)
    return f"image/{kind.lower()}", file.getvalue()


def picture_uris(store: FileStore, digests: Iterable[str]) -> dict[str, str]:
    """Return digest -> data URI of a thumbnail, or a sentence that says why there is none. All data URIs together have
    at most MAX_PICTURES_BYTES characters, and no thumbnail is begun after PICTURES_SECONDS."""
    deadline, num_left = time.monotonic() + PICTURES_SECONDS, MAX_PICTURES_BYTES
    uris = {}
    for digest in dict.fromkeys(digests):
        uris[digest] = "This image is not shown, so that the page stays small."
        if time.monotonic() >= deadline or num_left <= 0:
            continue
        try:
            kind, file = make_thumbnail(store, digest)
        except (PenstockError, OSError) as error:
            uris[digest] = f"This image cannot be shown: {error}"
            continue
        uri = f"data:{kind};base64,{base64.b64encode(file).decode()}"
        num_left -= len(uri)
        if num_left >= 0:
            uris[digest] = uri
    return uris
