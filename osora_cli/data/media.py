"""Media files in and out. This is the one module to import from; the parts have a file each."""

from osora_cli.data.decode import read_frames
from osora_cli.data.encode import VideoWriter, write_video
from osora_cli.data.media_types import STILL_EXTENSIONS, VIDEO_EXTENSIONS, MediaError, MediaInfo, is_still
from osora_cli.data.probe import probe

__all__ = [
    "STILL_EXTENSIONS",
    "VIDEO_EXTENSIONS",
    "MediaError",
    "MediaInfo",
    "VideoWriter",
    "is_still",
    "probe",
    "read_frames",
    "write_video",
]
