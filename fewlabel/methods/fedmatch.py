"""FedMatch: inter-client consistency and disjoint learning (Jeong et al., first version, 2020).

A model is the sum of sigma, moved by labels alone (eq. 5), and psi, moved by unlabeled images alone (eq. 6): towards
the helpers' predictions (eq. 1, 2), the labels that most of them agree on (eq. 3), sigma, and zero. Models count in the
average by their accuracy on the server's validation set (eq. 4), and the best of them are the next round's helpers.
Where clients have labels they move both (Algorithm 1); where the server has them it moves sigma, clients psi alone
(Algorithm 2). The functions of eq. 1 to 3 are in `learn.agreement`, those of the sparse wire in `learn.sparse`.

A helper is the receiver's sigma with another client's psi. Psi begins as a fifth of sigma, as in the authors' later
code, on which the paper is silent; BatchNorm's statistics travel with sigma. Entries of psi below `zero_below` are set
to zero before they leave. A client's learning rate falls to a third when its model's loss on the validation set was not
lower for three rounds; the server measures it, keeps the schedule and sends the rate (`learn.rate`). Of ties in eq. 3,
the local network's own label wins.

What leaves a site: sigma and psi after training, or psi alone; where they are sparse, as a bitmap of what changed and
the new values. They can betray training images to a curious server, and each psi that helps is sent to all clients.
Sums alone would not do: the server scores each model by itself.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel import tree
from fewlabel.errors import BadInput
from fewlabel.federation import EVERY_CLIENT, SERVER, ClientError, Federation, Model, Site, on_client, on_server
from fewlabel.learn.agreement import agreed, confident, fixmatch, inter_client
from fewlabel.learn.decomposed import Decomposed, floats, frozen, together, zeros
from fewlabel.learn.loop import SGD, Adam, Local, fit, paired
from fewlabel.learn.rate import Rate, Score, score
from fewlabel.learn.sparse import Packed, pack, unpack
from fewlabel.strict import Count, Natural, NonNegative, Positive, Share
from fewlabel.tree import Tree


@dataclass(frozen=True)
class Helper:
    client: str
    psi: Tree


@dataclass(frozen=True)
class State:
    """What the server keeps."""

    sigma: Tree  # with BatchNorm's statistics
    psi: Tree  # parameters alone
    helpers: tuple[Helper, ...] = ()
    rates: dict[str, Rate] = field(default_factory=dict)  # of each client, and of the server


@dataclass(frozen=True)
class Message:
    sigma: Tree
    psi: Packed
    helpers: tuple[Packed, ...]
    lr: float
    epochs: int


@dataclass(frozen=True)
class Update:
    sigma: Packed | None = None  # where labels moved it
    psi: Packed | None = None  # where unlabeled images did


@dataclass(frozen=True)
class FedMatch:
    """Sigma learns from labels and psi from unlabeled images, with help of the most reliable clients' psi."""

    helpers: Natural = 2  # H; 0 is the paper's "without inter-client consistency"
    confidence: Share = 0.75  # tau
    weight_labeled: NonNegative = 10.0  # lambda_s
    weight_unlabeled: NonNegative = 1.0  # lambda_u
    weight_l2: NonNegative = 0.01
    weight_l1: NonNegative = 0.0  # 0.01 for a sparse psi
    zero_below: NonNegative = 0.0  # entries of psi so near to zero leave as zeros; 1e-5 for a sparse psi
    psi_start: NonNegative = 0.2  # times sigma
    batch_unlabeled: Count = 50
    server_epochs: Count = 1  # E_G
    patience: Count = 3  # rounds without a lower validation loss, after which a learning rate falls
    decay: Positive = 3.0  # by what it is divided
    local: Local = Local(epochs=1, batch_size=10, lr=1e-4, momentum=0.9, weight_decay=0.0, clip=None)
    use_sigma: bool = True  # the paper's ablations: a part that is not used stays as it was at first
    use_psi: bool = True
    help_oneself: bool = True  # a helper gets its own psi, too

    settings = frozenset({EVERY_CLIENT, SERVER})

    def init(self, fed: Federation) -> State:
        if fed.server.validation is None:
            raise BadInput("fedmatch scores models on a validation set; set labels.validation, such as 0.1")
        sigma = fed.server.weights()
        return State(sigma, {name: self.psi_start * value for name, value in tree.parameters(sigma).items()})

    def model(self, state: State) -> Tree:
        return together(state.sigma, state.psi)

    def round(self, state: State, fed: Federation) -> State:
        if fed.server.labeled and self.use_sigma:  # Algorithm 2
            [update] = fed.map(self.local_update, [self.message(state, "server", self.server_epochs)])
            state = replace(state, sigma=self.unpacked(state, update or Update())[0])
            [score] = fed.map(self.score, [Model(self.model(state))])
            state = replace(state, rates=self.rates(state, {"server": score}))
        found, numbers = dict[str, tuple[Tree, Tree]](), 0
        jobs = ((client, self.message(state, str(client.id), self.local.epochs)) for client in fed.sample())
        for reply in fed.run(self.local_update, jobs):
            try:
                found[str(reply.client.id)] = self.unpacked(state, reply.upload)
            except ValueError as error:
                cause = f"its upload is refused: {error}"  # as other uploads that do not fit the network
                raise ClientError(reply.client.id, "local_update", fed.round, cause) from None
            numbers += sum(len(part.values) for part in (reply.upload.sigma, reply.upload.psi) if part)
        if not found:
            return state
        scores = list(fed.map(self.score, (Model(together(*parts)) for parts in found.values())))
        reliability = [score.accuracy for score in scores]
        weights = reliability if any(reliability) else [1.0 for _ in scores]
        sigma, psi = (tree.mean(zip(weights, part, strict=True)) for part in zip(*found.values(), strict=True))  # eq. 4
        best = sorted(zip(reliability, found, strict=True), key=lambda pair: -pair[0])[: self.helpers]
        whole = len(found) * sum(value.numel() for value in state.psi.values())
        filled = sum(int(value.count_nonzero()) for _, part in found.values() for value in part.values())
        fed.log(sent=numbers / whole, psi_density=filled / whole)  # as shares of one model's numbers
        rates = self.rates(state, dict(zip(found, scores, strict=True)))
        return State(sigma, psi, tuple(Helper(who, found[who][1]) for _, who in best), rates)

    def message(self, state: State, who: str, epochs: int) -> Message:
        lent = tuple(pack(helper.psi) for helper in state.helpers if self.help_oneself or helper.client != who)
        return Message(state.sigma, pack(state.psi), lent, state.rates.get(who, Rate(self.local.lr)).lr, epochs)

    def unpacked(self, state: State, update: Update) -> tuple[Tree, Tree]:
        sigma = unpack(update.sigma, floats(state.sigma)) if update.sigma else {}
        return state.sigma | sigma, unpack(update.psi, state.psi) if update.psi else state.psi

    def rates(self, state: State, scores: dict[str, Score]) -> dict[str, Rate]:
        before = {who: Rate(self.local.lr) for who in scores} | state.rates
        return before | {who: before[who].after(score.loss, self.patience, self.decay) for who, score in scores.items()}

    @on_server
    def score(self, site: Site[None], msg: Model) -> Score:
        assert site.validation is not None  # init saw to it
        return score(site.load(msg.model).eval(), site.validation)

    @on_client
    @on_server
    def local_update(self, site: Site[None], msg: Message) -> Update | None:
        labeled, unlabeled = site.labeled if self.use_sigma else None, site.unlabeled if self.use_psi else None
        if labeled is None and unlabeled is None:
            return None
        model, local, empty = site.load(msg.sigma), self.local, zeros(msg.sigma)
        received, helpers = unpack(msg.psi, empty), [unpack(psi, empty) for psi in msg.helpers]
        net = Decomposed(model, msg.sigma, received)
        kind = SGD if local.optimizer == "sgd" else Adam
        on_sigma, on_psi = (kind(part.values(), local, msg.lr) for part in (net.sigma, net.psi))
        for epoch in range(1, msg.epochs + 1):
            by_labels, by_images = partial(self.supervised, net), partial(self.unsupervised, net, helpers, site, epoch)
            sizes = local.batch_size, self.batch_unlabeled
            for some, others in paired(labeled, unlabeled, ("plain", "strong"), *sizes):
                if some:
                    fit(model, on_sigma, [some], by_labels, local.clip)
                if others:
                    fit(model, on_psi, [others], by_images, local.clip)
        sigma = floats(site.weights()) | frozen(net.sigma)
        psi = {name: value.where(value.abs() >= self.zero_below, 0.0) for name, value in frozen(net.psi).items()}
        site.score(tree.of(model) | together(frozen(net.sigma), psi))
        if labeled:  # what is not forgotten of them (Fig. 5c)
            model.eval()
            kept = score(lambda x: net(x, net.sigma, psi), labeled)
            site.show(labeled_accuracy=torch.tensor(kept.accuracy))
        return Update(pack(sigma, floats(msg.sigma)) if labeled else None, pack(psi, received) if unlabeled else None)

    def supervised(self, net: Decomposed, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Eq. 5."""
        x, y = batch
        return self.weight_labeled * cross_entropy(net(x, net.sigma, frozen(net.psi)), y)

    def unsupervised(
        self, net: Decomposed, helpers: list[Tree], site: Site[None], epoch: int, batch: tuple[Tensor, ...]
    ) -> Tensor:
        """Eq. 6, with eq. 1 to 3."""
        x, x_strong, index = batch
        sigma = frozen(net.sigma)
        local, others = net(x, sigma, net.psi), net.with_others(x, helpers)
        sure, _ = confident(local, self.confidence)
        label = agreed(local, others)
        site.audit(index[sure], label[sure], epoch)
        consistency = fixmatch(net(x_strong, sigma, net.psi), label, sure) + inter_client(local, others)
        far = torch.stack([(sigma[name] - psi).square().sum() for name, psi in net.psi.items()]).sum()
        large = torch.stack([psi.abs().sum() for psi in net.psi.values()]).sum()
        return self.weight_unlabeled * consistency + self.weight_l2 * far + self.weight_l1 * large
