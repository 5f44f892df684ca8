"""The script that each VM runs when it starts: it brings Ray up and keeps it up.

Worker 0 of the first slice is Ray's head, all others join it. Ray labels itself from the VM's metadata server,
so nothing here says which slice or worker it is. The token comes from the metadata server into a file that only
root may read, never into an argument or a line of output. The script goes on for as long as the VM runs: where
Ray ends, it starts it again, and a VM that restarts runs the script again.

What it does is in the serial console's output, in ``/var/log/raytpu.log``, and the last line of it in the guest
attribute ``raytpu/state``, which the API shows.
Not here: how the script reaches the VM (``request.py``).
"""

from __future__ import annotations

import shlex

from raytpu_ops.backends.tpu_vm.record import TOKEN
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.tpu.spec import SliceSpec

#: Ports of Ray on the head.
GCS_PORT, DASHBOARD_PORT, SERVE_PORT = 6379, 8265, 8000
#: The guest attribute in which a VM says how far it is: namespace and key.
STATE = "raytpu/state"


def script(spec: SliceSpec, settings: Settings) -> str:
    """The script; it is the same for every VM of a lease.

    :param spec: what was asked for.
    :param settings: the backend's options.
    """
    values = {
        "SLICES": str(spec.num_slices),
        "RAY_VERSION": settings.ray_version,
        "PYTHON": settings.python or "",
        "RAY_HEAD": settings.ray_head or "",
        "GCS_PORT": str(GCS_PORT),
        "DASHBOARD_PORT": str(DASHBOARD_PORT),
        "TOKEN_ENTRY": TOKEN,
        "STATE": STATE,
        "MORE_PATH": settings.env.get("PATH", ""),
    }
    environment = [f"{name}={value}" for name, value in settings.env.items() if name != "PATH"]
    arguments = [f"--{key}={value}" for key, value in settings.ray_start_params.items()]
    lines = [
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        f"PACKAGES=({shlex.join(settings.packages)})",
        f"RAY_ARGUMENTS=({shlex.join(arguments)})",
        f"ENVIRONMENT=({shlex.join(environment)})",
    ]
    return f"#!/bin/bash\n{chr(10).join(lines)}\n{_BODY}"


_BODY = r"""
set -u
shopt -s inherit_errexit
FOLDER=/run/raytpu
OWN=/opt/raytpu
LOG=/var/log/raytpu.log
INSTANCE=http://metadata.google.internal/computeMetadata/v1/instance
PYTHON=${PYTHON:-$OWN/venv/bin/python}
exec > >(tee -a "$LOG") 2>&1

# The user's variables are for what is run like this: here they would be in the way of the script's own.
with_environment() {
    env "${ENVIRONMENT[@]}" "$@"
}

metadata() {
    curl --silent --show-error --fail --retry 20 --retry-delay 1 --retry-connrefused --max-time 20 \
        --header 'Metadata-Flavor: Google' "$INSTANCE/$1"
}

tell() {
    echo "raytpu: $*"
    # Where guest attributes do not answer, the line is in the log and on the serial console all the same.
    curl --silent --show-error --output /dev/null --max-time 10 --request PUT \
        --header 'Metadata-Flavor: Google' --data-binary "$*" "$INSTANCE/guest-attributes/$STATE" || true
}

entry() {  # one value of tpu-env, which has lines like  NAME: 'value'
    metadata attributes/tpu-env | sed --quiet "s/^$1: *'\(.*\)' *\$/\1/p"
}

head_address() {  # host:port of Ray's head, empty where the metadata server does not say it
    local found
    if [[ -n $RAY_HEAD ]]; then
        echo "$RAY_HEAD"
        return
    elif ((SLICES > 1)); then
        # Google tells all slices of one request where worker 0 of the first one is.
        found=$(entry MEGASCALE_COORDINATOR_ADDRESS)
        found=${found%%:*}
    else
        # Addresses of the slice's workers in their order, each "name:id:address" or the address alone.
        found=$(metadata attributes/worker-network-endpoints)
        found=${found%%,*}
        found=${found##*:}
    fi
    echo "${found:+$found:$GCS_PORT}"
}

has_ray() {
    [[ -x $PYTHON ]] && "$PYTHON" - "$RAY_VERSION" <<'END'
import sys
from importlib import metadata
try:
    found = metadata.version("ray")
except metadata.PackageNotFoundError:
    found = "none"
if found != sys.argv[1]:
    sys.exit(f"raytpu: Ray {sys.argv[1]} is wanted in {sys.executable}, {found} is there")
END
}

install() {
    if ((${#PACKAGES[@]} == 0)); then
        echo "raytpu: the option pip is empty, so nothing is installed"
        return 1
    fi
    tell "slice $SLICE worker $WORKER installs ${PACKAGES[*]}"
    if [[ $PYTHON != "$OWN"/* ]]; then
        with_environment "$PYTHON" -m pip install --quiet "${PACKAGES[@]}"
        return
    fi
    export UV_PYTHON_INSTALL_DIR=$OWN/python UV_CACHE_DIR=$OWN/cache
    [[ -x $OWN/uv/bin/uv ]] || with_environment python3 -m pip install --quiet --target "$OWN/uv" uv
    [[ -x $PYTHON ]] || with_environment "$OWN/uv/bin/uv" venv --quiet --python 3.11 "$OWN/venv"
    with_environment "$OWN/uv/bin/uv" pip install --quiet --python "$PYTHON" "${PACKAGES[@]}"
}

start() {
    local address head role
    WORKER=$(metadata attributes/agent-worker-number)
    SLICE=0
    ((SLICES == 1)) || SLICE=$(entry MEGASCALE_SLICE_ID)
    address=$(metadata network-interfaces/0/ip)
    head=$(head_address)
    if [[ -z $SLICE || -z $head ]]; then
        echo "raytpu: the metadata server does not say where worker 0 of the first slice is"
        return 1
    fi
    has_ray || { install; has_ray; }

    mkdir -p --mode=700 "$FOLDER"
    (umask 077; metadata "attributes/$TOKEN_ENTRY" > "$FOLDER/token")
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$FOLDER/token"
    # A job's entrypoint says `python`: it must be the one that has Ray.
    export PATH="${PYTHON%/*}:${MORE_PATH:-$PATH}"
    ulimit -n 65536 || echo "raytpu: the limit of open files stays at $(ulimit -n)"

    if [[ -z $RAY_HEAD && $SLICE == 0 && $WORKER == 0 ]]; then
        role=(--head --port="$GCS_PORT" --dashboard-host="$address" --dashboard-port="$DASHBOARD_PORT")
    else
        role=(--address="$head")
        tell "slice $SLICE worker $WORKER at $address waits for Ray's head at $head"
        # Nobody listens there until the head has installed what it needs.
        until timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "${head%:*}" "${head##*:}" 2> /dev/null; do
            sleep 2
        done
    fi
    tell "slice $SLICE worker $WORKER at $address starts Ray $RAY_VERSION; its head is $head"
    exec env "${ENVIRONMENT[@]}" "$PYTHON" -m ray.scripts.scripts start "${role[@]}" --node-ip-address="$address" \
        "${RAY_ARGUMENTS[@]}" --block --log-color=false
}

last_lines() {  # of the log, without our own words about it
    grep --invert-match '^raytpu: ended' "$LOG" | tail --lines=4 | tr '\n' ' ' | cut --characters=1-600
}

while true; do
    (set -e -o pipefail; start)  # no `||` behind it: bash would go on after an error inside
    status=$?
    sleep 10  # what it said has reached the log by then, too
    tell "ended with $status and is tried again; its last lines: $(last_lines)"
done
"""
