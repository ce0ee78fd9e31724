"""FedMatch: inter-client consistency and disjoint learning (Jeong et al., first version, 2020).

A model is the sum of sigma and psi (`learn.decomposed`). Sigma learns only from labels (eq. 5: `FedMatch.supervised`).
Psi learns only from unlabeled images (eq. 6: `FedMatch.unsupervised`). It is pulled towards the predictions of helpers
(eq. 1, 2: `learn.losses.inter_client`, `learn.losses.fixmatch`), towards the label that most of them agree on (eq. 3:
`learn.thresholds.agreed`), towards sigma, and towards zero. A model counts in the average by its accuracy on the
server's validation set (eq. 4: `FedMatch.weights`), and the most accurate ones help in the next round. If clients have
labels, they train both parts (Algorithm 1). If the server has the labels, it trains sigma, and clients train only psi
(Algorithm 2). `learn.sparse` makes uploads small.

Departures from the paper, and decisions where it is silent:

- Only some clients may have labels, which the paper does not consider. Clients with labels train sigma, and clients
  with unlabeled images train psi. Each part is averaged over the clients that trained it. Only clients that trained psi
  may help.
- Psi starts as 0.2 sigma (`psi_start`), as in the authors' later code.
- The unlabeled image u of eq. 1 to 3 is shown as it is; only pi(u) is augmented.
- A helper is the receiver's sigma with another client's psi. All clients get the same helpers, and a client that helps
  gets its own psi, too (`help_oneself`).
- Eq. 3: if the local network's own label is among tied ones, it wins.
- Eq. 4 prints the weight outside of the sum; a weighted mean is meant. If no model is ever right, all count alike.
- BatchNorm's statistics travel with sigma.
- The paper does not say how psi becomes sparse. Entries of psi below `zero_below` are set to zero before they leave.
- An upload holds the new values exactly: all of them, or a bitmap with those that changed, whichever is smaller. A
  message to a client holds all of sigma, and psi without its zeros.
- In the paper the learning rate falls by a validation loss, but clients have no validation set. Here the server
  measures each model, keeps a schedule for each client and sends the rate (`learn.plateau`). After three rounds without
  a lower loss, the rate is divided by three.
- The weight of psi's absolute values is 0; the paper gives a range up to 0.01 (`fedmatch-sparse`).
- The paper mirrors and shifts test images, too. Here they are shown as they are; `views.test = "flip-shift"` does it.
- If a client has fewer labeled than unlabeled batches, the labeled ones start again, and the other way round.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, tensor
from torch.nn.functional import cross_entropy

from fewlabel.core import tree
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Site
from fewlabel.core.schema import Count, Natural, NonNegative, Positive, Share
from fewlabel.core.tasks import on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn import decomposed
from fewlabel.learn.decomposed import Decomposed, Update, floats, frozen, summed, together
from fewlabel.learn.loop import paired
from fewlabel.learn.losses import adjusted, fixmatch, inter_client
from fewlabel.learn.optim import Local
from fewlabel.learn.plateau import Rate, Score, score, score_on_validation, updated
from fewlabel.learn.sparse import Packed, pack, trimmed, unpack
from fewlabel.learn.thresholds import agreed, confident

Trees = list[Tree]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Helper:
    client: str
    psi: Packed
    says: Tensor | None = None  # its model's prediction for an image of noise, in the ICLR version


@dataclass(frozen=True)
class State:
    """The server's state."""

    sigma: Tree  # with BatchNorm's statistics
    psi: Tree  # only parameters
    helpers: tuple[Helper, ...] = ()
    rates: dict[str, Rate] = field(default_factory=dict)  # learning rates of clients and the server


@dataclass(frozen=True)
class Message:
    sigma: Tree
    psi: Packed
    helpers: tuple[Packed, ...]
    lr: float
    epochs: int


@dataclass(frozen=True)
class FedMatch:
    """Sigma learns from labels. Psi learns from unlabeled images, with the help of the most accurate clients' psi."""

    helpers: Natural = 2  # H: clients whose psi helps the others; 0 is the paper's "without inter-client consistency"
    confidence: Share = 0.75  # tau: probability from which a pseudo-label counts
    weight_labeled: NonNegative = 10.0  # lambda_s: weight of the loss on labeled images
    weight_unlabeled: NonNegative = 1.0  # lambda_u: weight of the loss on unlabeled images
    weight_l2: NonNegative = 0.01  # lambda_L2: weight of psi's squared distance from sigma
    weight_l1: NonNegative = 0.0  # lambda_L1: weight of psi's absolute values; 0.01 for a sparse psi
    zero_below: NonNegative = 0.0  # entries of psi nearer to zero than this are sent as zeros; 1e-5 for a sparse psi
    keep_below: NonNegative = 0.0  # entries that moved less than this are sent as they were received
    psi_start: NonNegative = 0.2  # psi starts as sigma times this
    batch_unlabeled: Count = 50  # images in an unlabeled batch
    server_epochs: Count = 1  # E_G: epochs of a round at the server, if it has the labels
    patience: Count = 3  # a learning rate falls after so many rounds without a lower validation loss
    decay: Positive = 3.0  # a learning rate that falls is divided by this
    local: Local = Local(epochs=1, batch_size=10, lr=1e-4, momentum=0.9, weight_decay=0.0, clip=None)
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    use_sigma: bool = True  # train sigma; if false, it stays as it was at first (an ablation of the paper)
    use_psi: bool = True  # train psi; if false, it stays as it was at first (an ablation of the paper)
    help_oneself: bool = True  # a client that helps the others gets its own psi as a helper, too

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    needs_each_model = True  # to score it
    leaves = decomposed.LEAVES + "each psi that helps is sent to all clients. The server scores each model by itself."
    plots = decomposed.WEIGHTS_OF_PARTS
    cautions = decomposed.one_rate

    def init(self, fed: Federation) -> State:
        if fed.server.validation is None:
            raise BadInput("fedmatch scores models on a validation set; set labels.validation, such as 0.1")
        sigma = fed.server.weights()
        return State(sigma, {name: self.psi_start * value for name, value in tree.parameters(sigma).items()})

    def model(self, state: State) -> Tree:
        return together(state.sigma, state.psi)

    def round(self, state: State, fed: Federation) -> State:
        if fed.server.labeled and self.use_sigma:  # Algorithm 2
            [update] = fed.map(self.local_update, [self.message(state, pack(state.psi), "server", fed.round)])
            state = replace(state, sigma=self.unpacked(state, update or Update())[0])
            [found] = fed.map(self.score, [Model(self.model(state))])
            state = replace(state, rates=self.rates(state, {"server": found}))
        packed = pack(state.psi)
        jobs = ((client, self.message(state, packed, str(client.id), fed.round)) for client in fed.sample())
        replies = fed.run(self.local_update, jobs)
        sent = {str(r.client.id): r.upload.moved(r.client.num_labeled, r.client.num_unlabeled) for r in replies}
        if not sent:
            return state
        models = (Model(together(*self.unpacked(state, update))) for update in sent.values())
        scores = dict(zip(sent, fed.map(self.score, models), strict=True))
        sigmas = {who: update.sigma for who, update in sent.items() if update.sigma}
        psis = {who: update.psi for who, update in sent.items() if update.psi}
        by_sigma, by_psi = (self.weights([scores[who] for who in moved]) for moved in (sigmas, psis))
        fed.log(
            **decomposed.traffic(sigmas, psis, state.psi, len(sent)),
            **decomposed.shares(sigma=(sigmas, by_sigma), psi=(psis, by_psi)),
        )
        sigma, psi = decomposed.average(sigmas, state.sigma, by_sigma), decomposed.average(psis, state.psi, by_psi)
        return State(sigma, psi, self.choose(state, psis, scores), self.rates(state, scores))

    def weights(self, scores: list[Score]) -> list[float]:
        """Return the weights of models, eq. 4. If no model is ever right, all count alike."""
        return [found.accuracy for found in scores] if any(found.accuracy for found in scores) else [1.0] * len(scores)

    def choose(self, state: State, psis: dict[str, Packed], scores: dict[str, Score]) -> tuple[Helper, ...]:
        """Return who may help from the next round on. If nobody moved psi, the helpers stay the same."""
        best = sorted(psis, key=lambda who: -scores[who].accuracy)[: self.helpers]
        return tuple(Helper(who, pack(unpack(psis[who], state.psi))) for who in best) or state.helpers

    def lent(self, state: State, who: str, round: int) -> list[Helper]:
        """Return the helpers of a client in a round."""
        return [helper for helper in state.helpers if self.help_oneself or helper.client != who]

    def message(self, state: State, psi: Packed, who: str, round: int) -> Message:
        lent = tuple(helper.psi for helper in self.lent(state, who, round))
        epochs = self.server_epochs if who == "server" else self.local.epochs
        return Message(state.sigma, psi, lent, state.rates.get(who, Rate(self.local.lr)).lr, epochs)

    def unpacked(self, state: State, update: Update) -> tuple[Tree, Tree]:
        sigma = unpack(update.sigma, floats(state.sigma)) if update.sigma else {}
        return state.sigma | sigma, unpack(update.psi, state.psi) if update.psi else state.psi

    def rates(self, state: State, scores: dict[str, Score]) -> dict[str, Rate]:
        return updated(state.rates, scores, self.local.lr, self.patience, self.decay)

    @on_server
    def score(self, site: Site[None], msg: Model) -> Score:
        return score_on_validation(site, msg.model)

    @on_client
    @on_server
    def local_update(self, site: Site[None], msg: Message) -> Update | None:
        labeled, unlabeled = site.labeled if self.use_sigma else None, site.unlabeled if self.use_psi else None
        if labeled is None and unlabeled is None:
            return None
        model, empty = site.load(msg.sigma), decomposed.zeros(msg.sigma)
        received, helpers = unpack(msg.psi, empty), [unpack(psi, empty) for psi in msg.helpers]
        net = Decomposed(model, msg.sigma, received)
        optimizers = net.optimizers(self.local, msg.lr)
        for epoch in range(1, 1 + (msg.epochs if labeled else self.epochs_unlabeled or msg.epochs)):
            # With helpers, eq. 1 trains psi on the plain view, too.
            steps = paired(labeled, unlabeled, ("plain", "strong"), *self.sizes(site), 1 + bool(helpers))
            losses = partial(self.supervised, net, site), partial(self.unsupervised, net, helpers, site, epoch)
            net.train(optimizers, steps, *losses, self.local.clip)
        sigma = trimmed(frozen(net.sigma), msg.sigma, 0.0, self.keep_below)
        psi = trimmed(frozen(net.psi), received, self.zero_below, self.keep_below)
        site.score(tree.of(model) | together(sigma, psi))
        if labeled:  # how much of them it has not forgotten (Fig. 5c)
            model.eval()
            site.show(labeled_accuracy=tensor(score(lambda x: net(x, sigma, psi), labeled).accuracy))
        sigma = floats(site.weights()) | sigma
        return Update(pack(sigma, floats(msg.sigma)) if labeled else None, pack(psi, received) if unlabeled else None)

    def sizes(self, site: Site[None]) -> tuple[int, int]:
        """Return the sizes of labeled and of unlabeled batches."""
        return self.local.batch_size, self.batch_unlabeled

    def supervised(self, net: Decomposed, site: Site[None], batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of sigma, eq. 5."""
        logits = adjusted(net(batch[0], net.sigma, frozen(net.psi)), site.labeled)
        return self.weight_labeled * cross_entropy(logits, batch[1])

    def unsupervised(self, net: Decomposed, helpers: Trees, site: Site[None], epoch: int, batch: Batch) -> Tensor:
        """Return the loss of psi, eq. 6."""
        loss = self.consistency(net, helpers, site, epoch, batch) + self.weight_l2 * net.far()
        return loss + self.weight_l1 * net.large() if self.weight_l1 else loss

    def consistency(self, net: Decomposed, helpers: Trees, site: Site[None], epoch: int, batch: Batch) -> Tensor:
        """Return the loss of eq. 2, which contains eq. 1 and 3."""
        x, x_strong, index = batch
        local, strong = net.logits(summed(frozen(net.sigma), net.psi), x, x_strong)
        others = net.with_others(x, helpers)
        sure, _ = confident(local, self.confidence)
        label = agreed(local, others)
        site.audit(index[sure], label[sure], epoch)
        return self.weight_unlabeled * (fixmatch(strong, label, sure) + inter_client(local, others))
