#!/bin/sh
# A Kubernetes on this machine (kind, in Docker) with one played TPU slice: two hosts of four chips that
# are not there. KubeRay, the TPU webhook, the scheduler and Ray are the real ones. For trying the `gke`
# backend without a cloud; the tests of this package use tests/testbed instead, which needs no Docker.
#
# Needs docker, kind, kubectl, git and about 16 GB of memory. From the root of the repository:
#
#   sh deploy/kind/up.sh        # ends with the command that tells Airflow about it
#   kind delete cluster --name raytpu
set -eu

NAME=raytpu
IMAGE=raytpu-kind:1
KUBERAY=${KUBERAY:-v1.6.2}
CERT_MANAGER=${CERT_MANAGER:-v1.18.2}
WEBHOOK=${WEBHOOK:-kuberay-tpu-webhook/v1.3.5}
# Checkpoints: `make ui` has them here, and each pod sees this folder under the same path.
STORAGE=${STORAGE:-$PWD/.airflow/storage}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$STORAGE"
STORAGE=$(cd "$STORAGE" && pwd)
# Airflow runs in a shell of its own, whose $KUBECONFIG may be another.
CONFIG=$(dirname "$STORAGE")/kind-kubeconfig
CONNECTION=$(dirname "$STORAGE")/kind-connection.json
# Ray's pods are user 1000, whoever you are.
chmod 1777 "$STORAGE"

sed "s|STORAGE|$STORAGE|" deploy/kind/cluster.yaml >"$folder/cluster.yaml"
kind create cluster --name "$NAME" --config "$folder/cluster.yaml"
use() { kubectl --context "kind-$NAME" "$@"; }

# What GKE's device plugin would offer. Nobody takes it back: the kubelet does not know it.
for node in $(use get nodes --selector cloud.google.com/gke-tpu-accelerator --output name); do
    use patch "$node" --subresource status --type json \
        --patch '[{"op": "add", "path": "/status/capacity/google.com~1tpu", "value": "4"}]'
done

use create --kustomize "https://github.com/ray-project/kuberay/ray-operator/config/default?ref=$KUBERAY"
use apply --filename "https://github.com/cert-manager/cert-manager/releases/download/$CERT_MANAGER/cert-manager.yaml"
use wait --namespace cert-manager --for condition=Available deployment --all --timeout 300s
git clone --quiet --depth 1 --branch "$WEBHOOK" https://github.com/ai-on-gke/kuberay-tpu-webhook "$folder/webhook"
use apply --filename "$folder/webhook/deployments/deployment.yaml"
use apply --filename "$folder/webhook/certs" --filename "$folder/webhook/deployments"
use wait --namespace ray-system --for condition=Available deployment --all --timeout 300s
use wait --for condition=Available deployment/kuberay-operator --timeout 300s

docker build --file docker/ray-tpu/Dockerfile --tag "$IMAGE" .
kind load docker-image "$IMAGE" --name "$NAME" --nodes "$NAME-worker,$NAME-worker2,$NAME-worker3"
use create namespace raytpu
use apply --filename deploy/gke/rbac.yaml

(umask 077 && kind get kubeconfig --name "$NAME" >"$CONFIG")
sed "s|STORAGE|$STORAGE|; s|KUBECONFIG|$CONFIG|" deploy/kind/connection.json >"$CONNECTION"
cat <<END

It is up. Look at it:   .venv/bin/raytpu doctor --backend gke --kubeconfig $CONFIG --namespace raytpu
Tell Airflow of it:     AIRFLOW_HOME=\$PWD/.airflow .venv/bin/airflow connections add ray_tpu_default \\
                            --conn-type ray_tpu --conn-extra "\$(cat $CONNECTION)"
Then trigger the DAG with backend gke and one slice.
END
