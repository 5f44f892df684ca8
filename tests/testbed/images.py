"""The images of the testbed and the registry that serves them to every node.

The Ray image holds next to nothing: each container gets the host's `/usr`, interpreter and virtual
environment mounted read-only by the container runtime (`nodes.base_spec`). So a pod needs no volumes
of its own, manifests stay those of production, and no gigabytes are copied.
The registry answers for every registry name, docker.io too; faults are played by what it answers.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

PAUSE = "testbed.invalid/pause:1"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
#: User and group of the images that the Ray project publishes.
RAY_USER, RAY_GROUP = 1000, 100


class Image:
    """One layer and what goes with it, as a registry serves them.

    :param files: path -> content; None makes a folder, a `str` a symbolic link.
    :param config: the `config` of the image: Env, Entrypoint, User.
    """

    def __init__(self, files: dict[str, bytes | str | None], config: dict[str, object]) -> None:
        layer = _tar(files)
        self.blobs: dict[str, bytes] = {}
        diff_id = self._keep(layer)
        about = {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        }
        content = json.dumps(about).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._about("application/vnd.oci.image.config.v1+json", content),
            "layers": [self._about("application/vnd.oci.image.layer.v1.tar", layer)],
        }
        self.manifest = json.dumps(manifest).encode()
        self.digest = self._keep(self.manifest)

    def _keep(self, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return digest

    def _about(self, kind: str, content: bytes) -> dict[str, object]:
        return {"mediaType": kind, "digest": self._keep(content), "size": len(content)}


def _tar(files: dict[str, bytes | str | None]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            if path.startswith("/home/"):
                entry.uid, entry.gid = RAY_USER, RAY_GROUP
            if content is None:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if path == "/tmp" else 0o755
                archive.addfile(entry)
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def pause_image() -> Image:
    """What holds a pod's namespaces."""
    busybox = Path("/bin/busybox").read_bytes()
    return Image({"/busybox": busybox}, {"Entrypoint": ["/busybox", "sleep", "2147483647"], "Env": []})


def ray_image(venv: str) -> Image:
    """An image with Ray in it, for all that a pod can see.

    :param venv: the virtual environment with Ray.
    """
    files: dict[str, bytes | str | None] = {
        **dict.fromkeys(("/tmp", "/usr", "/etc", "/home", "/home/ray", "/root", "/opt", "/var"), None),
        **{f"/{name}": f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")},
        "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nray:x:1000:100:ray:/home/ray:/bin/bash\n",
        "/etc/group": b"root:x:0:\nusers:x:100:\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }
    environment = {
        "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/ray",
        "LANG": "C.UTF-8",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Five hosts of a slice start on two cores here.
        "RAY_raylet_start_wait_time_s": "180",
    }
    config: dict[str, object] = {
        "User": f"{RAY_USER}:{RAY_GROUP}",
        "WorkingDir": "/home/ray",
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Cmd": ["/bin/bash"],
    }
    return Image(files, config)


@dataclass(frozen=True)
class ImageFault:
    """What happens to a pull.

    :param pattern: of the whole reference, `*/ray:broken`.
    :param missing: the registry answers 404.
    :param delay: seconds that the pull takes.
    """

    pattern: str
    missing: bool = False
    delay: float = 0.0


class Registry:
    """A registry that is read only, and asked in the name of every registry.

    :param venv: the virtual environment with Ray.
    """

    def __init__(self, venv: str) -> None:
        self._pause = pause_image()
        self._ray = ray_image(venv)
        self.faults: list[ImageFault] = []
        self.pulled: list[str] = []
        self.app = web.Application()
        self.app.router.add_get("/v2/", self._version)
        self.app.router.add_get(r"/v2/{name:.+}/manifests/{tag}", self._manifest)
        self.app.router.add_get(r"/v2/{name:.+}/blobs/{digest}", self._blob)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({})

    def _image(self, name: str) -> Image | None:
        last = name.rsplit("/", 1)[-1]
        return self._pause if last == "pause" else self._ray if "ray" in last else None

    def _fault(self, reference: str) -> ImageFault | None:
        return next((one for one in reversed(self.faults) if fnmatch.fnmatch(reference, one.pattern)), None)

    async def _manifest(self, request: web.Request) -> web.Response:
        name, tag = request.match_info["name"], request.match_info["tag"]
        reference = f"{request.query.get('ns', 'docker.io')}/{name}:{tag}"
        image, fault = self._image(name), self._fault(reference)
        if image is None or (fault is not None and fault.missing):
            error = {"code": "MANIFEST_UNKNOWN", "message": f"{reference}: manifest unknown"}
            return web.json_response({"errors": [error]}, status=404)
        # A tag is asked for once in each pull; all that follows goes by digest.
        if not tag.startswith("sha256:"):
            self.pulled.append(reference)
        if fault is not None and fault.delay:
            await asyncio.sleep(fault.delay)
        headers = {"Docker-Content-Digest": image.digest, "Content-Type": _MANIFEST}
        return web.Response(body=image.manifest, headers=headers)

    async def _blob(self, request: web.Request) -> web.Response:
        image = self._image(request.match_info["name"])
        content = image.blobs.get(request.match_info["digest"]) if image else None
        if content is None:
            return web.json_response({"errors": [{"code": "BLOB_UNKNOWN"}]}, status=404)
        return web.Response(body=content, content_type="application/octet-stream")
