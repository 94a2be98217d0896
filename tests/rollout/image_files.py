"""Image files made in memory: good ones with the pixels that they must give, bad ones with the message."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 40, 24
RED, BLUE, WHITE = (250, 10, 20), (10, 20, 250), (255, 255, 255)


def picture(mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    """A picture whose left half is red and whose right half is blue, converted to a mode of Pillow."""
    image = Image.new("RGB", size, BLUE)
    image.paste(RED, (0, 0, size[0] // 2, size[1]))
    return image.convert(mode)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def grey16(values: np.ndarray, format: str = "PNG") -> bytes:
    return encode(Image.fromarray(values.astype(np.uint16)), format)


def with_alpha() -> Image.Image:
    """Opaque red on the left, transparent blue on the right."""
    image = picture("RGBA")
    image.putalpha(Image.fromarray(np.repeat([[255] * (WIDTH // 2) + [0] * (WIDTH // 2)], HEIGHT, 0).astype(np.uint8)))
    return image


def rotated(orientation: int, format: str = "PNG", **options: Any) -> bytes:
    """An image of four colours that a viewer turns according to the EXIF tag."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(Image.fromarray(QUARTERS), format, exif=exif, **options)


def two(left: tuple[int, int, int], right: tuple[int, int, int]) -> np.ndarray:
    return np.array([[left, right]], np.uint8)


def png_file(width: int, height: int, depth: int, kind: int, pixels: bytes, key: bytes = b"") -> bytes:
    """A PNG of a number of bits per channel and a colour type. `key` is its transparent colour, none if empty."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header, rows = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0), zlib.compress(pixels)
    parts = [(b"IHDR", header), *([(b"tRNS", key)] if key else []), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def png16(kind: int, left: tuple[int, ...], right: tuple[int, ...], key: tuple[int, ...] = ()) -> bytes:
    """A PNG of two pixels with 16 bits per channel."""
    pixels = b"\0" + struct.pack(f">{2 * len(left)}H", *left, *right)
    return png_file(2, 1, 16, kind, pixels, struct.pack(f">{len(key)}H", *key))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has few bytes of pixels: a decompression bomb."""
    return png_file(width, height, 8, 2, bytes(99))


def animation(format: str) -> bytes:
    frames = [picture(), picture().rotate(180)]
    return encode(frames[0], format, save_all=True, append_images=frames[1:])


def tiff(mode: str, value: float) -> bytes:
    return encode(Image.new(mode, (4, 4), value), "TIFF")


def expected(left: tuple[int, ...], right: tuple[int, ...], size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    pixels = np.empty((size[1], size[0], 3), np.uint8)
    pixels[:, : size[0] // 2], pixels[:, size[0] // 2 :] = left, right
    return pixels


HALVES = expected(RED, BLUE)
QUARTERS = np.concatenate([HALVES[:12], expected(WHITE, (0, 90, 0))[12:]])
TURNED = QUARTERS.transpose(1, 0, 2)
UPRIGHT = {  # EXIF orientation -> QUARTERS as a viewer shows it
    1: QUARTERS, 2: QUARTERS[:, ::-1], 3: QUARTERS[::-1, ::-1], 4: QUARTERS[::-1],
    5: TURNED, 6: TURNED[:, ::-1], 7: TURNED[::-1, ::-1], 8: TURNED[::-1],
}  # fmt: skip
# Name -> file, RGB that it must give [H, W, 3], largest difference.
GOOD: dict[str, tuple[Callable[[], bytes], np.ndarray, int]] = {
    "png": (lambda: encode(picture()), HALVES, 0),
    "bmp": (lambda: encode(picture(), "BMP"), HALVES, 0),
    "ppm": (lambda: encode(picture(), "PPM"), HALVES, 0),
    "tiff": (lambda: encode(picture(), "TIFF"), HALVES, 0),
    "gif": (lambda: encode(picture(), "GIF"), HALVES, 0),
    "webp without loss": (lambda: encode(picture(), "WEBP", lossless=True), HALVES, 0),
    "jpeg": (lambda: encode(picture(), "JPEG", quality=95), HALVES, 75),
    "cmyk jpeg": (lambda: encode(picture("CMYK"), "JPEG", quality=95), HALVES, 75),
    "grey": (lambda: encode(Image.new("L", (8, 4), 77)), np.full((4, 8, 3), 77, np.uint8), 0),
    "black and white": (lambda: encode(Image.new("1", (8, 4), 1)), np.full((4, 8, 3), 255, np.uint8), 0),
    "16-bit grey": (lambda: grey16(np.full((4, 8), 0x4D12)), np.full((4, 8, 3), 0x4D, np.uint8), 0),
    "32-bit integers of 16 bits": (lambda: tiff("I", 0x4D12), np.full((4, 4, 3), 0x4D, np.uint8), 0),
    "16-bit colour": (lambda: png16(2, (0x4D12, 0, 0), (0xFFFF, 1, 2)), two((0x4D, 0, 0), (255, 0, 0)), 0),
    "16-bit colour with alpha": (
        lambda: png16(6, (0x4D12, 0, 0, 0xFFFF), (0x4D12, 0, 0, 0)),
        two((0x4D, 0, 0), WHITE),
        0,
    ),
    "transparent 16-bit grey": (lambda: png16(0, (0x4D12,), (0x2000,), key=(0x2000,)), two((0x4D,) * 3, WHITE), 0),
    "transparent 16-bit colour": (
        lambda: png16(2, (0x4D12, 0, 0), (0x4D12, 0x1234, 0), key=(0x4D12, 0x1234, 0)),
        two((0x4D, 0, 0), WHITE),
        0,
    ),
    "without end": (lambda: encode(picture())[:-12], HALVES, 0),
    "palette": (lambda: encode(picture().quantize(4)), HALVES, 2),
    "palette with transparency": (
        lambda: encode(Image.new("P", (4, 4), 0), transparency=0),
        np.full((4, 4, 3), 255, np.uint8),
        0,
    ),
    "alpha": (lambda: encode(with_alpha()), expected(RED, WHITE), 0),
    "half transparent": (
        lambda: encode(Image.new("RGBA", (2, 2), (0, 0, 0, 128))),
        np.full((2, 2, 3), 127, np.uint8),
        0,
    ),
    "grey with alpha": (lambda: encode(Image.new("LA", (2, 2), (9, 0))), np.full((2, 2, 3), 255, np.uint8), 0),
    **{f"exif orientation {tag}": (partial(rotated, tag), pixels, 0) for tag, pixels in UPRIGHT.items()},
    "exif out of range": (lambda: rotated(9), UPRIGHT[1], 0),
    "exif in jpeg": (lambda: rotated(6, "JPEG", quality=95), UPRIGHT[6], 130),
    "damaged exif": (lambda: encode(picture(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), HALVES, 0),
    "photo with thumbnail (MPO)": (lambda: animation("MPO"), HALVES, 75),
    "bytes after the end": (lambda: encode(picture()) + b"trailing", HALVES, 0),
}
PNG = encode(picture(size=(200, 200)).effect_spread(50))
JPEG = encode(picture(size=(200, 200)).effect_spread(50), "JPEG")
GIF = encode(picture(size=(200, 200)).effect_spread(50), "GIF")
# Name -> file, what its message must say.
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "large file": (lambda: bytes(2 << 20), "has 2 MiB; 1 are allowed"),
    "zero bytes": (lambda: b"", "has no bytes"),
    "text": (lambda: b"<html>404 not found</html>", "is none of PNG, JPEG"),
    "heic": (lambda: b"\0\0\0\x20ftypheic" + bytes(99), "is none of PNG, JPEG"),
    "icon": (lambda: encode(picture(), "ICO"), "is none of PNG, JPEG"),
    "truncated png": (lambda: PNG[: len(PNG) // 2], "cannot be decoded"),
    "truncated jpeg": (lambda: JPEG[: len(JPEG) // 2], "cannot be decoded .*truncated"),
    "truncated gif": (lambda: GIF[: len(GIF) // 2], "cannot be decoded .*truncated"),
    "damaged pixels": (lambda: PNG[:3000] + bytes(2000) + PNG[5000:], "cannot be decoded"),
    "no pixels": (lambda: png_header(0, 5), "(cannot be decoded|is none of)"),
    "bomb": (lambda: png_header(60_000, 60_000), "has .*decompression bomb"),
    "just too many pixels": (lambda: png_header(8192, 8193), "has 8192 x 8193 pixels, but at most"),
    "too long": (lambda: encode(Image.new("RGB", (1001, 5))), "has 1001 x 5 pixels; one side may be at most 200"),
    "animated gif": (lambda: animation("GIF"), "has 2 frames or pages"),
    "pages of a tiff": (lambda: animation("TIFF"), "has 2 frames or pages"),
    "floating-point pixels": (lambda: tiff("F", 0.5), "has floating-point pixels"),
    "32-bit pixels": (lambda: tiff("I", 1 << 20), "has 32-bit pixels"),
}
