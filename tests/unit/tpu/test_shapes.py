"""Each derived value against Ray's own helpers, and what people type against the shape that they mean."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.shapes import GENERATIONS, SliceShape, catalogue, resolve

SHAPES = catalogue()
a_shape = st.sampled_from(SHAPES)


def dimensions(shape: SliceShape) -> list[int]:
    return [int(part) for part in shape.topology.split("x")]


def refusal(*words: object) -> str:
    """The one line with which these words are refused; empty where they are not."""
    try:
        resolve(*words)
    except InvalidSpec as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def ray_tpu():
    return pytest.importorskip("ray._private.accelerators.tpu")


@pytest.fixture(scope="module")
def ray_util():
    return pytest.importorskip("ray.util.tpu")


class TestAgainstRay:
    """Ray is right about what Ray does; our catalogue must say the same before a cluster exists."""

    @given(shape=a_shape)
    def test_pod_type_is_the_one_that_ray_infers(self, ray_tpu, shape):
        assert shape.pod_type == ray_tpu.infer_tpu_pod_type_from_topology(shape.topology, shape.ray_accelerator)

    @given(shape=a_shape)
    def test_pod_type_is_one_that_ray_accepts_as_an_environment_variable(self, ray_tpu, shape):
        assert ray_tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_type(shape.pod_type)
        assert ray_tpu.normalize_tpu_accelerator_type(shape.pod_type) == shape.pod_type

    @given(shape=a_shape)
    def test_chips_are_those_that_ray_counts(self, ray_tpu, shape):
        assert shape.chips == ray_tpu.get_num_chips_from_topology(shape.topology)
        assert shape.chips == ray_tpu.get_total_chips_from_accelerator_type(shape.pod_type)

    @given(shape=a_shape)
    def test_cores_per_chip_are_those_that_ray_counts(self, ray_tpu, shape):
        assert shape.generation.cores_per_chip == ray_tpu.get_tpu_cores_per_chip(shape.pod_type)

    @given(shape=a_shape)
    def test_ray_accelerator_names_the_generation_that_ray_knows(self, ray_util, shape):
        assert ray_util.get_tpu_version_from_type(shape.ray_accelerator) == shape.ray_generation

    @given(shape=a_shape)
    def test_chips_per_vm_is_told_exactly_where_ray_would_guess_otherwise(self, ray_tpu, shape):
        guess = ray_tpu.get_chips_per_host(shape.topology, shape.ray_generation)
        assert (shape.ray_chips_per_vm or guess) == shape.chips_per_host
        assert (shape.ray_chips_per_vm is None) == (guess == shape.chips_per_host)

    @given(shape=a_shape, slices=st.integers(1, 4))
    def test_hosts_are_the_workers_that_ray_plans_for(self, ray_util, shape, slices):
        workers, resources = ray_util.get_tpu_worker_resources(
            topology=shape.topology,
            accelerator_type=shape.ray_accelerator,
            num_slices=slices,
            chips_per_vm=shape.ray_chips_per_vm,
        )
        assert workers == shape.hosts * slices
        assert resources["TPU"] == shape.chips_per_host

    @given(shape=a_shape)
    def test_chips_of_a_host_are_a_request_that_ray_grants(self, ray_tpu, shape):
        granted, why = ray_tpu.TPUAcceleratorManager.validate_resource_request_quantity(shape.chips_per_host)
        assert granted, why

    def test_ray_reserves_says_which_topologies_ray_lists(self, ray_tpu):
        listed = ray_tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_topology
        assert {str(s) for s in SHAPES if s.ray_reserves} == {
            str(s) for s in SHAPES if listed(s.ray_generation, s.topology)
        }

    @given(shape=a_shape)
    def test_a_slice_that_ray_does_not_list_is_refused_with_one_that_it_does(self, ray_tpu, shape):
        listed = ray_tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_topology
        if listed(shape.ray_generation, shape.topology):
            shape.check_reserved()
            return
        with pytest.raises(
            InvalidSpec, match=f"topology: Ray 2.60 has no {shape.generation.name} {shape.topology}"
        ) as no:
            shape.check_reserved()
        assert listed(shape.ray_generation, str(no.value).split("'")[1])

    @given(shape=a_shape, data=st.data())
    def test_a_host_labels_itself_as_the_shape_says(self, ray_tpu, shape, data):
        """What ``ray start`` reads out of our variables: labels, head resource, accelerator type."""
        worker_id = data.draw(st.integers(0, shape.hosts - 1))
        manager = ray_tpu.TPUAcceleratorManager
        with pytest.MonkeyPatch.context() as patch:
            for name, value in shape.host_env("a-slice", worker_id).items():
                patch.setenv(name, value)
            assert manager.get_current_node_accelerator_type() == shape.ray_accelerator
            labels = {**manager.get_current_node_accelerator_labels(), "ray.io/accelerator-type": shape.ray_accelerator}
            resources = manager.get_current_node_additional_resources()
        assert labels == {
            **shape.ray_labels,
            "ray.io/tpu-slice-name": "a-slice",
            "ray.io/tpu-worker-id": str(worker_id),
        }
        head = {shape.head_resource: 1} if worker_id == 0 else {}
        assert resources == {"a-slice": 1, **head}

    def test_everything_ray_lists_for_our_generations_is_in_the_catalogue_or_known_to_be_missing(self, ray_tpu):
        ours = {(s.ray_generation, s.topology) for s in SHAPES}
        missing = {
            (generation.ray_name, topology)
            for generation in GENERATIONS
            for topology in ray_tpu.VALID_TPU_TOPOLOGY[generation.ray_name]
            if (generation.ray_name, topology) not in ours
            # Ray lists every order of the dimensions; GKE has one.
            and sorted(map(int, topology.split("x"))) == list(map(int, topology.split("x")))
        }
        # No node pool of that shape exists on GKE.
        assert missing == {("v5litepod", "2x8"), ("v6e", "2x8")}


class TestCatalogue:
    @given(shape=a_shape)
    def test_a_shape_is_made_of_whole_hosts(self, shape):
        assert shape.hosts * shape.chips_per_host == shape.chips == prod(dimensions(shape))
        assert dict(shape.generation.machine_types)[shape.chips_per_host] == shape.machine_type
        assert shape.chips <= shape.generation.max_chips

    @given(shape=a_shape)
    def test_a_shape_is_found_by_its_own_words(self, shape):
        assert resolve(shape.generation.name, shape.topology, shape.machine_type) is shape

    def test_no_two_shapes_are_the_same(self):
        assert len({(s.generation.name, s.topology, s.machine_type) for s in SHAPES}) == len(SHAPES)

    @given(shape=a_shape)
    def test_dimensions_are_ordered_as_gke_wants_them(self, shape):
        if shape.topology == "2x2x1":  # the one exception, in Google's own words
            return
        assert dimensions(shape) == sorted(dimensions(shape))
        if len(dimensions(shape)) == 3 and shape.chips >= 64:
            assert all(dimension % 4 == 0 for dimension in dimensions(shape))

    @pytest.mark.parametrize(
        ("generation", "largest", "beyond"),
        [
            ("v4", "16x16x16", "16x16x20"),
            ("v5p", "16x16x24", "16x20x24"),
            ("7x", "16x24x24", "20x24x24"),
            ("v5e", "16x16", "16x32"),
            ("v6e", "16x16", "16x32"),
        ],
    )
    def test_the_largest_slice_is_there_and_nothing_beyond_it(self, generation, largest, beyond):
        shape = resolve(generation, largest)
        assert shape.chips == shape.generation.max_chips == max(s.chips for s in catalogue(generation))
        with pytest.raises(InvalidSpec, match=beyond):
            resolve(generation, beyond)

    @pytest.mark.parametrize(
        ("generation", "expected"),
        [
            (
                "v6e",
                [
                    ("1x1", "ct6e-standard-1t", 1),
                    ("2x2", "ct6e-standard-4t", 1),
                    ("2x4", "ct6e-standard-8t", 1),
                    ("2x4", "ct6e-standard-4t", 2),
                    ("4x4", "ct6e-standard-4t", 4),
                    ("4x8", "ct6e-standard-4t", 8),
                    ("8x8", "ct6e-standard-4t", 16),
                    ("8x16", "ct6e-standard-4t", 32),
                    ("16x16", "ct6e-standard-4t", 64),
                ],
            ),
            (
                "v5e",
                [
                    ("1x1", "ct5lp-hightpu-1t", 1),
                    ("2x2", "ct5lp-hightpu-4t", 1),
                    ("2x4", "ct5lp-hightpu-8t", 1),
                    ("2x4", "ct5lp-hightpu-4t", 2),
                    ("4x4", "ct5lp-hightpu-4t", 4),
                    ("4x8", "ct5lp-hightpu-4t", 8),
                    ("8x8", "ct5lp-hightpu-4t", 16),
                    ("8x16", "ct5lp-hightpu-4t", 32),
                    ("16x16", "ct5lp-hightpu-4t", 64),
                ],
            ),
        ],
    )
    def test_the_two_dimensional_generations_have_exactly_these(self, generation, expected):
        assert [(s.topology, s.machine_type, s.hosts) for s in catalogue(generation)] == expected

    @pytest.mark.parametrize("generation", ["v4", "v5p", "7x"])
    def test_the_three_dimensional_generations_begin_with_these(self, generation):
        first = [(s.topology, s.hosts) for s in catalogue(generation)][:7]
        assert first == [
            ("2x2x1", 1),
            ("2x2x2", 2),
            ("2x2x4", 4),
            ("2x4x4", 8),
            ("4x4x4", 16),
            ("4x4x8", 32),
            ("4x4x12", 48),
        ]

    def test_placement_is_compact_except_for_7x_and_none_for_one_host(self):
        assert resolve("v4", "2x2x2").placement == "compact"
        assert resolve("7x", "2x2x2").placement == "workload"
        assert resolve("7x", "2x2x1").placement is None

    def test_gke_words(self):
        shape = resolve("v5e", "4x4")
        assert shape.node_selector == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": "4x4",
        }
        assert shape.tolerations == [
            {"key": "google.com/tpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}
        ]


class TestSpellings:
    @pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
    def test_every_spelling_means_its_generation_in_any_case(self, generation):
        for word in generation.spellings:
            for typed in (word, word.upper(), f"  {word} ", f"TPU-{word}", word.replace("-", "_")):
                assert catalogue(typed) == catalogue(generation.name), typed

    def test_no_spelling_means_two_generations(self):
        words = [word for generation in GENERATIONS for word in set(generation.spellings)]
        assert len(words) == len(set(words))

    @pytest.mark.parametrize(
        ("typed", "name"),
        [
            ("v4", "v4"),
            ("V4", "v4"),
            ("tpu-v4-podslice", "v4"),
            ("v5e", "v5e"),
            ("v5litepod", "v5e"),
            ("v5-lite", "v5e"),
            ("tpu-v5-lite-podslice", "v5e"),
            ("TPU-V5LITEPOD", "v5e"),
            ("v5p", "v5p"),
            ("v6e", "v6e"),
            ("TPU-V6E", "v6e"),
            ("trillium", "v6e"),
            ("7x", "7x"),
            ("v7x", "7x"),
            ("tpu7x", "7x"),
            ("TPU-V7X", "7x"),
            ("Ironwood", "7x"),
        ],
    )
    def test_what_people_type(self, typed, name):
        assert {s.generation.name for s in catalogue(typed)} == {name}

    @pytest.mark.parametrize(
        ("pod_type", "meant"),
        [
            ("v6e-16", "v6e 4x4 (ct6e-standard-4t)"),
            ("v5litepod-16", "v5e 4x4 (ct5lp-hightpu-4t)"),
            ("v5e-256", "v5e 16x16 (ct5lp-hightpu-4t)"),
            ("v4-8", "v4 2x2x1 (ct4p-hightpu-4t)"),
            ("v4-16", "v4 2x2x2 (ct4p-hightpu-4t)"),
            ("TPU-V5P-128", "v5p 4x4x4 (ct5p-hightpu-4t)"),
            ("tpu7x-16", "7x 2x2x2 (tpu7x-standard-4t)"),
            ("v6e-4x8", "v6e 4x8 (ct6e-standard-4t)"),
            ("tpu7x-2x2x1", "7x 2x2x1 (tpu7x-standard-4t)"),
        ],
    )
    def test_a_pod_type_names_the_topology_too(self, pod_type, meant):
        assert str(resolve(pod_type)) == meant

    @given(shape=a_shape)
    def test_a_pod_type_and_its_topology_agree(self, shape):
        assert resolve(shape.pod_type, shape.topology, shape.machine_type) is shape

    @pytest.mark.parametrize("topology", ["4x4", "4X4", " 4x4 ", "4\u00d74"])
    def test_topologies_in_any_writing(self, topology):
        assert resolve("v6e", topology).topology == "4x4"

    def test_machine_types_in_any_case(self):
        assert resolve("v6e", "2x4", " CT6E-standard-4T ").hosts == 2


class TestRefusals:
    @pytest.mark.parametrize("generation", ["v5e", "v6e"])
    def test_2x4_asks_which_machines(self, generation):
        with pytest.raises(InvalidSpec) as refused:
            resolve(generation, "2x4")
        assert "machine_type" in str(refused.value)
        assert "1 host of 8 chips" in str(refused.value)
        assert "2 hosts of 4 chips" in str(refused.value)

    def test_a_pod_type_with_several_topologies_asks_which(self):
        with pytest.raises(InvalidSpec, match="4x4x32, 4x8x16, 8x8x8"):
            resolve("v5p-1024")

    def test_a_pod_type_that_contradicts_the_topology_is_refused(self):
        with pytest.raises(InvalidSpec, match=r"v6e-16 .* is not 4x8, which is a v6e-32"):
            resolve("v6e-16", "4x8")

    def test_a_pod_type_that_is_none_names_its_neighbours(self):
        with pytest.raises(InvalidSpec, match="v4-8, v4-16, v4-32"):
            resolve("v4-17")

    def test_turned_dimensions_get_the_right_order(self):
        with pytest.raises(InvalidSpec, match="'2x2x1'"):
            resolve("v4", "1x2x2")

    @given(words=st.tuples(*[st.none() | st.text(max_size=300) | st.integers() | st.booleans()] * 3))
    def test_nonsense_is_one_line(self, words):
        message = refusal(*words)
        assert message.isprintable()
        assert len(message) < 1000

    @pytest.mark.parametrize("worker_id", [-1, 2, True, 0.0, "0", None])
    def test_a_host_that_the_slice_has_not_is_refused(self, worker_id):
        with pytest.raises(InvalidSpec, match="numbered 0 to 1"):
            resolve("v4", "2x2x2").host_env("s", worker_id)
