"""What users learn once holds in all of privacy: names, keyword arguments, ledgers, values, representations."""

import copy
import gc
import inspect
import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import accelerant
import accelerant as acl
from accelerant.errors import ConfigError
from accelerant.privacy import dp, federated, he, mpc
from accelerant.privacy.mpc.secagg import run_round
from accelerant.privacy.mpc.secagg.protocol import make_identities
from refusals import assert_raises

EVENT = dp.PrivacyEvent("gaussian", 1.0)


def test_names_that_changed_say_the_new_one():
    assert dp.Ledger is dp.PrivacyLedger
    for module, old, new in ((dp, "Event", "PrivacyEvent"), (dp, "Statement", "PrivacyStatement"),
                             (dp, "GradientPrivatizer", "Privatizer"),
                             (he.bfv, "Parameters", "EncryptionParameters")):  # fmt: skip
        assert_raises(AttributeError, f"{old} is {new} now", getattr, module, old)
        assert getattr(module, new).__name__ == new


def public():
    """Public functions, classes and their methods: (name, callable)."""
    modules = (dp, mpc, federated, he.paillier, he.bfv, mpc.shamir, mpc.beaver)
    for name, value in [(name, getattr(module, name)) for module in modules for name in module.__all__]:
        if callable(value):
            yield name, value
        if inspect.isclass(value) and not issubclass(value, Exception):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in vars(value) if key[0] != "_")


def test_floats_that_could_be_exchanged_are_keywords():
    """LocalLaplace checks that its bounds ascend, and an event has text between its two."""
    for name, value in public():
        if callable(value) and name not in ("LocalLaplace", "PrivacyEvent"):
            kinds = [x for x in inspect.signature(value).parameters.values() if x.kind is not x.KEYWORD_ONLY]
            assert sum(str(x.annotation).startswith("float") for x in kinds) < 2, name


@pytest.mark.parametrize("call", [
    lambda: dp.calibrate(8.0, 1e-5, 0.01, 100), lambda: dp.Privatizer(8.0, 1e-5, 1.0, 10, 0.1, expected_batch_size=4),
    lambda: dp.Budget(3.0, 1e-5), lambda: dp.LocalGaussian(1.0, 3, 1.0, 1e-5), lambda: dp.LocalLaplace(0.0, 1.0, 1.0),
    lambda: dp.AdaptiveClipping(0.5, 0.2), lambda: dp.PrivacyLedger().remaining(1.0, 1e-5, EVENT),
    lambda: mpc.SecureAggregation(3, 2, 4, 8.0), lambda: dp.PrivacyEvent("gaussian", 1.0, "poisson", 0.1, 1, 1e-9),
])  # fmt: skip
def test_numbers_without_a_name_are_refused(call):
    assert_raises(TypeError, "positional argument", call)


UPDATES = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])]
NOISY = {"max_norm": 1.0, "noise_multiplier": 4.0}
LEDGERS = {  # what takes a ledger, and the unit of a file that it creates
    "gaussian_noise_": (lambda book: dp.gaussian_noise_(torch.zeros(3), 9.0, sensitivity=1.0, ledger=book), "example"),
    "laplace_noise_": (lambda book: dp.laplace_noise_(torch.zeros(3), 9.0, sensitivity=1.0, ledger=book), "example"),
    "release": (lambda book: dp.release(3, mechanism="laplace", sensitivity=1, epsilon=0.1, ledger=book), "example"),
    "RandomizedResponse": (
        lambda book: dp.RandomizedResponse(2, epsilon=1.0).randomize(torch.tensor([1]), ledger=book), "example"),
    "LocalLaplace": (
        lambda book: dp.LocalLaplace(0.0, 1.0, epsilon=1.0).randomize(torch.ones(1), ledger=book), "example"),
    "LocalGaussian": (lambda book: dp.LocalGaussian(max_norm=1.0, dimensions=1, epsilon=1.0, delta=1e-5).randomize(
        torch.ones(1, 1), ledger=book), "example"),
    "Privatizer": (lambda book: dp.Privatizer(noise_multiplier=9.0, max_grad_norm=1.0, expected_batch_size=1.0,
        ledger=book).step(torch.ones(1, 2)), "example"),
    "make_private": (lambda book: train(book), "example"),
    "secure_aggregate": (lambda book: mpc.secure_aggregate(UPDATES, 2, ledger=book, **NOISY), "client"),
    "simulate": (lambda book: federated.simulate(
        nn.Linear(2, 2), (torch.randn(6, 2), torch.tensor([0, 1] * 3)), clients=3, rounds=1, ledger=book, **NOISY),
        "client"),
    "a client's own": (lambda book: aggregate_with(book), "client"),
}  # fmt: skip


def train(book):
    model = nn.Linear(2, 2)
    with dp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=9.0, delta=1e-5,
                         max_grad_norm=1.0, sample_rate=0.5, ledger=book) as private:  # fmt: skip
        for batch in private.batches((torch.randn(8, 2), torch.arange(8) % 2), steps=1):
            nn.functional.cross_entropy(model(batch.tensors[0]), batch.tensors[1]).backward()
            private.step()
    if isinstance(private.ledger, dp.PrivacyLedger) and private.ledger is not book:
        private.ledger.close()


def aggregate_with(book):
    setup = mpc.SecureAggregation(clients=3, threshold=2, size=2, **NOISY)
    signing, keys = make_identities(3)
    clients = [setup.client(i, key, keys, ledger=book if i == 0 else None) for i, key in enumerate(signing)]
    run_round(setup.server(0, keys), clients, lambda i: (UPDATES[i], 1), 0, {})


@pytest.mark.sample(2, 1)
@pytest.mark.filterwarnings("ignore:.*delta 1e-05 is not below")
@pytest.mark.parametrize("name", LEDGERS)
def test_a_path_is_taken_wherever_a_ledger_is(tmp_path, name):
    """Twice: the second call adds to the file that the first has created and closed."""
    release, unit = LEDGERS[name]
    path = tmp_path / "spent.jsonl"
    for count, kind in ((1, str), (2, Path)):
        release(kind(path))
        gc.collect()  # a Privatizer that nobody uses any more releases its file
        with dp.PrivacyLedger(path, unit=unit, neighbouring=dp.PrivacyLedger.read(path).neighbouring) as ledger:
            assert sum(event.count for event in ledger.events) == count
    assert_raises(ConfigError, "ledger must be a PrivacyLedger, a path or None, got int", release, 3)


@pytest.mark.parametrize("aggregator", ["client", "server"])
def test_a_round_is_recorded_where_the_ledger_was(tmp_path, monkeypatch, aggregator):
    """A program that changes its folder must not begin another ledger, without what was spent."""
    monkeypatch.chdir(tmp_path)
    setup = mpc.SecureAggregation(clients=3, threshold=2, size=2, **NOISY)
    signing, keys = make_identities(3)
    book, other = "spent.jsonl", tmp_path / "other"
    server = setup.server(0, keys, ledger=book if aggregator == "server" else None)
    books = [book if aggregator == "client" and i == 0 else None for i in range(3)]
    clients = [setup.client(i, key, keys, ledger=books[i]) for i, key in enumerate(signing)]
    other.mkdir()
    monkeypatch.chdir(other)
    run_round(server, clients, lambda i: (UPDATES[i], 1), 0, {})
    assert not list(other.iterdir())
    assert sum(event.count for event in dp.PrivacyLedger.read(tmp_path / book).events) == 1


def test_a_ledgers_file_keeps_its_unit(tmp_path):
    path = tmp_path / "spent.jsonl"
    dp.PrivacyLedger(path, unit="patient").close()
    dp.release(3, mechanism="laplace", sensitivity=1, epsilon=0.1, ledger=path)
    assert dp.PrivacyLedger.read(path).unit == "patient"
    dp.PrivacyLedger(tmp_path / "examples.jsonl").close()
    with pytest.raises(ConfigError, match="the ledger's unit is an example"):
        mpc.secure_aggregate(UPDATES, 2, ledger=tmp_path / "examples.jsonl", **NOISY)
    with pytest.raises(ConfigError, match="local privacy is for replaced records"):
        dp.LocalLaplace(0.0, 1.0, epsilon=1.0).randomize(torch.ones(1), ledger=tmp_path / "examples.jsonl")


@pytest.mark.parametrize("call", [
    lambda: dp.gaussian_noise_(torch.zeros(1), 1.0, secure=False),
    lambda: dp.laplace_noise_(torch.zeros(1), 1.0, secure=True),
    lambda: dp.release(1, mechanism="laplace", sensitivity=1, epsilon=1.0, secure=False),
    lambda: dp.LocalLaplace(0.0, 1.0, epsilon=1.0, secure=False),
    lambda: dp.LocalGaussian(max_norm=1.0, dimensions=1, epsilon=1.0, delta=1e-5, secure=False),
    lambda: dp.Privatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1.0, secure=False),
])  # fmt: skip
def test_what_weakens_noise_is_called_insecure(call):
    assert_raises(TypeError, "no argument secure= any more: it is insecure=, its opposite, now", call)


def test_make_private_takes_insecure_and_its_opposite():
    def source(**options):
        model = nn.Linear(2, 2)
        with dp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, delta=1e-5,
                             max_grad_norm=1.0, sample_rate=0.5, **options) as private:  # fmt: skip
            return private.optimizer._release.source.secure

    assert [source(), source(secure=True), source(insecure=False)] == [True] * 3
    assert [source(secure=False), source(insecure=True), source(insecure=False, secure=False)] == [False] * 3
    with pytest.raises(ConfigError, match="give either insecure or secure, its opposite; got True and True"):
        source(insecure=True, secure=True)
    for wrong in ({"insecure": "no"}, {"insecure": 1}, {"secure": "no"}, {"secure": 0}):
        assert_raises(ConfigError, "secure must be True or False, got", source, **wrong)
    with pytest.raises(ConfigError, match="insecure must be True or False, got 'no'"):
        dp.gaussian_noise_(torch.zeros(2), 1.0, insecure="no")


def test_a_bound_of_elements_is_called_max_abs():
    assert mpc.secure_aggregate(UPDATES, 2, max_abs=0.5).total.tolist() == [1.0, 0.5]
    for call in (
        lambda: mpc.SecureAggregation(clients=3, threshold=2, size=4, clip=8.0),
        lambda: mpc.secure_aggregate(UPDATES, 2, clip=1.0),
        lambda: federated.simulate(nn.Linear(2, 2), (torch.zeros(3, 2), torch.zeros(3)), clients=3, clip=1.0),
    ):
        assert_raises(TypeError, "no argument clip= any more: it is max_abs= now", call)


def test_a_learning_rate_has_its_short_name():
    data, models = (torch.ones(3, 2), torch.tensor([0, 1, 0])), []
    torch.manual_seed(0)
    start = nn.Linear(2, 2)
    for options in ({"lr": 0.5}, {"learning_rate": 0.5}):
        models.append(federated.simulate(start, data, clients=3, rounds=1, **options).model)
    assert torch.equal(models[0].weight, models[1].weight)
    with pytest.raises(TypeError, match="learning_rate= and lr=, which are the same: give one"):
        federated.simulate(start, data, clients=3, lr=0.1, learning_rate=0.1)


def test_make_private_understands_the_names_of_opacus():
    model = nn.Linear(2, 2)
    with dp.make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
                         target_delta=1e-6, max_grad_norm=1.0, sample_rate=0.5) as private:  # fmt: skip
        assert (private.model, private.delta) == (model, 1e-6)
    with pytest.raises(TypeError, match="delta= and target_delta=, which are the same"):
        dp.make_private(model, None, delta=1e-5, target_delta=1e-5)


def test_one_name_of_draws():
    model = nn.Linear(2, 2)
    with dp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, delta=1e-5,
                         max_grad_norm=1.0, sample_rate=0.5) as private:  # fmt: skip
        with pytest.raises(AttributeError, match=r"PrivateTraining\.draws is PrivateTraining\.batches now"):
            private.draws((torch.zeros(4, 2),))
        step, count = dp.PrivateStep(private, lambda x, y: nn.functional.cross_entropy(model(x), y)), 0
        for batch in private.batches((torch.randn(64, 2), torch.arange(64) % 2), microbatch=8, steps=3):
            result = step(batch, 0.1)
            assert (result is not None) == batch.last
            count += batch.last
        assert private.optimizer.steps == count == 3


@pytest.fixture(scope="module")
def keys():
    """Key pairs of Paillier and BFV."""
    return (*he.paillier.keygen(bits=1024, insecure=True), *he.bfv.keygen(n=4096, rotations=[1]))


@pytest.fixture(scope="module")
def shares():
    return mpc.shamir.split(torch.tensor([1, -2, 3]), threshold=2, count=3)


@pytest.fixture(scope="module")
def values(keys, shares):
    """What privacy's functions return, by a name."""
    paillier, _, bfv, bfv_private = keys
    return {
        "share": shares[0],
        "verifiable share": mpc.shamir.split(torch.tensor([1.5]), threshold=2, count=3, verifiable=True)[1],
        "share of bytes": mpc.shamir.split(b"secret", threshold=2, count=2)[0],
        "triple": mpc.beaver.deal_triples(shares[0].sharing, shares[0].sharing)[0],
        "Paillier key": paillier,
        "Paillier ciphertexts": paillier.encrypt(np.array([1.5, -2.0]), limit=4.0),
        "packed ciphertexts": paillier.encrypt(torch.tensor([1, 2, 3]), pack=True),
        "BFV parameters": bfv.parameters,
        "BFV key": bfv,
        "BFV ciphertexts": bfv.encrypt([1, 2, 3]),
        "BFV ciphertexts of the key holder": bfv_private.encrypt(torch.tensor([[1, 2], [3, 4]])),
        "a BFV result": bfv.encrypt([1, 2, 3]).rotate(1) * 2,
        "event": EVENT,
        "budget": dp.Budget(epsilon=1.0, delta=1e-5),
        "clipping": dp.AdaptiveClipping(quantile=0.3),
        "settings": mpc.SecureAggregation(clients=3, threshold=2, size=4, max_abs=1.0),
        "statement": dp.PrivacyLedger().statement(),
    }


def test_values_cross_processes_and_compare(values):
    for name, value in values.items():
        for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
            assert other == value, name
            assert type(other) is type(value)
        assert value != "another"
        assert [key for key, other in values.items() if value == other] == [name]


def test_values_that_differ_in_little_differ(keys, shares, values):
    paillier, paillier_private, bfv, bfv_private = keys
    again = mpc.shamir.split(torch.tensor([1, -2, 3]), threshold=2, count=3)
    assert shares[0] not in (shares[1], again[0])
    assert len({*shares, *again, copy.copy(shares[0])}) == 6
    for public in (paillier, bfv):  # ciphertexts of the same values
        assert public.encrypt([1]) != public.encrypt([1])
    bare = he.bfv.PublicKey.from_bytes(bfv.to_bytes(computing=False))
    assert bare != bfv
    assert bare.fingerprint == bfv.fingerprint
    restored = pickle.loads(pickle.dumps((bfv, values["a BFV result"])))
    assert bfv_private.decrypt(restored[1] + restored[0].encrypt([1, 1])).tolist()[:2] == [5, 7]
    one, two = (mpc.secure_aggregate(UPDATES, 2, max_abs=bound).report for bound in (4.0, 0.5))
    assert pickle.loads(pickle.dumps(one)) == one != two
    results = paillier.encrypt(np.array([1, 2])) * 3  # a pickle has other randomness: a product shows its factor
    assert pickle.loads(pickle.dumps(results)) != results
    assert paillier_private.decrypt(pickle.loads(pickle.dumps(results))).tolist() == [3, 6]


def test_private_keys_are_not_pickled(keys):
    for private, duplicate in itertools.product(keys[1::2], (pickle.dumps, copy.copy, copy.deepcopy)):
        assert_raises(ConfigError, "a private key is not pickled or copied", duplicate, private)


def test_representations_say_what_a_person_wants(tmp_path, values):
    for name, value in public():
        if inspect.isclass(value):
            assert value.__repr__ is not object.__repr__, name
    with dp.PrivacyLedger(tmp_path / "p.jsonl", unit="patient", budget=dp.Budget(epsilon=9, delta=1e-5)) as ledger:
        ledger.record(EVENT.times(3))
        assert repr(ledger).startswith(
            f"PrivacyLedger({str(tmp_path / 'p.jsonl')!r}, unit='patient', 3 releases, 1 kind"
        )
    privatizer = dp.Privatizer(noise_multiplier=1.5, max_grad_norm=2.0, expected_batch_size=4)
    assert repr(privatizer).startswith("Privatizer(noise_multiplier=1.5, sensitivity=2, sampling='unknown'")
    assert repr(dp.PoissonSampler(60000, 0.01)) == "PoissonSampler(60000 units, sample_rate=0.01, steps=None)"
    assert repr(dp.GroupedSampler([1, 1, 2], 0.5)).startswith("GroupedSampler(2 units")
    assert repr(values["triple"]).startswith("Triple(a=Share(1 of 3, threshold 2")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "CPU", acl.runtime.ComputeDevice])
def test_devices_are_given_as_elsewhere(device, keys, shares):
    device = acl.devices()[-1] if device is acl.runtime.ComputeDevice else device
    setup = mpc.SecureAggregation(clients=3, threshold=2, size=2, max_abs=1.0)
    signing, public = make_identities(3)
    for place in (device, None, "auto"):
        assert isinstance(setup.server(0, public, device=place).device, torch.device)
        assert isinstance(setup.client(0, signing[0], public, device=place).device, torch.device)
    if not (isinstance(device, acl.runtime.ComputeDevice) and device.backend != "cpu"):
        assert mpc.secure_aggregate(UPDATES, 2, device=device).total.tolist() == [1.5, -0.5]
        assert mpc.shamir.Share.from_bytes(shares[0].to_bytes(), device) == shares[0]
        assert mpc.shamir.combine(mpc.shamir.split([1, 2], 2, 3, device=device), device=device).tolist() == [1, 2]
        assert keys[0].encrypt([1], device=device).residues.space.label == "cpu"
        assert he.bfv.PublicKey.from_bytes(keys[2].to_bytes(), device=device) == keys[2]
    assert_raises(ConfigError, "device must be a name", setup.server, 0, public, device=3)


# --- names of the packages --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("package", [dp, federated, he, mpc])
def test_every_name_is_there(package):
    assert sorted(package.__all__) == dir(package)
    for name in package.__all__:
        found = getattr(package, name)
        assert package is not dp or found.__name__.endswith(name)
    assert getattr(accelerant.privacy, package.__name__.rpartition(".")[2]) is package
    for where in (package, accelerant.privacy):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            where.nothing  # noqa: B018  the look-up is the test


@pytest.mark.slow
def test_the_package_loads_nothing_by_itself():
    code = (
        "import sys, accelerant.privacy.dp as dp; "
        "assert not [m for m in sys.modules if m.startswith(('dp_accounting', 'scipy', 'accelerant.privacy.dp.'))]; "
        "dp.make_private; assert 'dp_accounting' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
