"""Right loops that look odd: what people do around accumulation, clips, schedules, several
optimizers and losses. Each means what it computes."""

import copy
import itertools
import math
import warnings

import audited
import torch
from audited import Batch, Decoder, Looping, N, adam, network, of_rows, rows, scaler_of, sgd
from cases import seeded_into
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

ODD: list[Looping] = []

odd = seeded_into(ODD)


# --- what loops share -----------------------------------------------------------------------------


def copy_of(model: nn.Module) -> nn.Module:
    """A target or a teacher: a frozen copy."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, model: nn.Module, rate: float) -> None:
    """A moving average of parameters."""
    for slow, fast in zip(target.parameters(), model.parameters()):
        slow.lerp_(fast, rate)


def pairs(count: int, classes: int = 11, length: int = 6) -> list[Batch]:
    """Tokens [4, length], and those that follow each."""
    tokens = torch.randint(classes, (count, 4, length + 1))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two augmentations of the same inputs."""
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(a, b).mean()


def slopes(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Gradients for the inputs, of which a gradient can be taken again."""
    return torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]


def least_squares(scores: Tensor, label: float) -> Tensor:
    return F.mse_loss(scores, torch.full_like(scores, label))


class LanguageModel(nn.Module):
    """`model(tokens, state)`, of which the embedding may be sparse or tied to the head."""

    def __init__(self, *, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16, sparse=sparse)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 11)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, state=None):
        output, state = self.lstm(self.embedding(tokens), state)
        return self.head(output), state


def of_tokens(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


# --- adversaries ----------------------------------------------------------------------------------


@odd
def wgan_with_gradient_penalty(watch):
    """Five steps of the critic for one of the generator; each clears its own gradients before its
    pass, so what the generator's pass leaves in the critic is never used."""
    generator, critic = network(8, 16), network(16, 1)
    of_generator, of_critic = adam(generator, betas=(0.0, 0.9)), adam(critic, betas=(0.0, 0.9))
    with watch(nn.ModuleList([generator, critic]), of_critic, windows=10) as audit:
        for i, (x, _) in enumerate(rows(12)):
            fake = generator(torch.randn(len(x), 8)).detach()
            mixed = torch.lerp(x, fake, torch.rand(len(x), 1)).requires_grad_()
            penalty = (slopes(critic(mixed), mixed).norm(dim=1) - 1).square().mean()
            of_critic.zero_grad()
            (critic(fake).mean() - critic(x).mean() + 10 * penalty).backward()
            of_critic.step()
            if (i + 1) % 5 == 0:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(len(x), 8))).mean()).backward()
                of_generator.step()
    return audit


@odd
def path_lengths_lazily(watch):
    """StyleGAN2: every fourth time the generator has a second step, of path lengths alone, whose
    weight is four times as large because it comes every fourth time."""
    generator = nn.ModuleDict({"mapping": network(8, 8), "synthesis": network(8, 16)})
    judge, every, average = network(16, 1), 4, torch.zeros(())
    of_generator, of_judge = adam(generator, betas=(0.0, 0.99**0.8)), adam(judge, betas=(0.0, 0.99))

    def images():
        styles = generator["mapping"](torch.randn(8, 8))
        return styles, generator["synthesis"](styles)

    with watch(nn.ModuleList([generator, judge]), of_generator, windows=10) as audit:
        for i, (x, _) in enumerate(rows(12)):
            of_judge.zero_grad()
            fake = images()[1].detach()
            (F.softplus(judge(fake)).mean() + F.softplus(-judge(x)).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            F.softplus(-judge(images()[1])).mean().backward()
            of_generator.step()
            if i % every == 0:
                styles, image = images()
                lengths = slopes(image * torch.randn_like(image) / 4, styles).norm(dim=1)
                average = torch.lerp(average, lengths.mean().detach(), 0.01)
                of_generator.zero_grad()
                (2 * every * (lengths - average).square().mean()).backward()
                of_generator.step()
    return audit


@odd
def cycles_of_two_generators(watch):
    """CycleGAN: two generators in one optimizer, discriminators frozen while these learn, and a
    schedule for each optimizer that steps once an epoch."""
    generators = nn.ModuleList([network(16, 16), network(16, 16)])
    judges = nn.ModuleList([network(16, 1), network(16, 1)])
    of_generators = torch.optim.Adam(
        itertools.chain(generators[0].parameters(), generators[1].parameters()), lr=2e-4
    )
    of_judges = adam(judges, betas=(0.5, 0.999))
    schedules = [
        lr_scheduler.LambdaLR(o, lambda epoch: 1 - epoch / 3) for o in (of_generators, of_judges)
    ]
    with watch(nn.ModuleList([generators, judges]), of_generators) as audit:
        for _ in range(2):
            for (a, _), (b, _) in zip(rows(8)[:4], rows(8)[4:]):
                to_b, to_a = generators
                fake_b, fake_a = to_b(a), to_a(b)
                judges.requires_grad_(False)
                of_generators.zero_grad()
                loss = least_squares(judges[0](fake_a), 1) + least_squares(judges[1](fake_b), 1)
                loss = loss + 10 * (F.l1_loss(to_a(fake_b), a) + F.l1_loss(to_b(fake_a), b))
                (loss + 5 * (F.l1_loss(to_a(a), a) + F.l1_loss(to_b(b), b))).backward()
                of_generators.step()
                judges.requires_grad_(True)
                of_judges.zero_grad()
                for judge, real, fake in zip(judges, (a, b), (fake_a, fake_b)):
                    scores = judge(real), judge(fake.detach())
                    (0.5 * (least_squares(scores[0], 1) + least_squares(scores[1], 0))).backward()
                of_judges.step()
            for schedule in schedules:
                schedule.step()
    return audit


class Reversed(torch.autograd.Function):
    """The input, and its gradient times a negative factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


@odd
def reversed_gradients(watch):
    """Domains are told apart behind a layer that reverses gradients, by a factor that grows with
    the training; labels and domains are two losses of one pass."""
    model = nn.ModuleDict({"f": network(16, 8), "labels": network(8, 8), "domains": network(8, 2)})
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), rows(4 * N)
    with watch(model, optimizer) as audit:
        for i, (source, y) in enumerate(batches):
            factor = 2 / (1 + math.exp(-10 * i / len(batches))) - 1
            features = model["f"](torch.cat([source, source.flip(1) + 1]))
            domains = torch.arange(2).repeat_interleave(len(source))
            loss = F.cross_entropy(model["labels"](features[: len(y)]), y)
            judged = model["domains"](Reversed.apply(features, factor))
            ((loss + F.cross_entropy(judged, domains)) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@odd
def perturbed_embeddings(watch):
    """FGM: a second pass is made where the embedding is moved along its gradient, and both passes
    count; the embedding is put back before the step."""
    model = LanguageModel()
    optimizer, table = adam(model), model.embedding.weight
    with watch(model, optimizer) as audit:
        for tokens, targets in pairs(6):
            of_tokens(model(tokens)[0], targets).backward()
            kept = table.data.clone()
            table.data.add_(table.grad / table.grad.norm())
            of_tokens(model(tokens)[0], targets).backward()
            table.data.copy_(kept)
            optimizer.step()
            optimizer.zero_grad()
    return audit


# --- learning to learn ----------------------------------------------------------------------------


@odd
def reptile(watch, model, optimizer):
    """The step of the outer optimizer goes to where a copy went in five steps of its own; its
    gradients are the ways there."""
    with watch(model, optimizer) as audit:
        for task in range(6):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.02)
            for x, y in rows(5):
                inner.zero_grad()
                of_rows(learner, x + task, y).backward()
                inner.step()
            for parameter, learned in zip(model.parameters(), learner.parameters()):
                parameter.grad = (parameter - learned).detach()
            optimizer.step()
    return audit


@odd
def maml(watch):
    """Two inner steps by `autograd.grad` in the graph, for each of four tasks; the mean of their
    losses afterwards is the loss of the outer step."""
    model = network()
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for tasks in audited.windows_of(rows(5 * N)):
            optimizer.zero_grad()
            for x, y in tasks:
                adapted = dict(model.named_parameters())
                for _ in range(2):
                    loss = F.cross_entropy(functional_call(model, adapted, x[:4]), y[:4])
                    grads = torch.autograd.grad(loss, adapted.values(), create_graph=True)
                    adapted = {n: p - 0.1 * g for (n, p), g in zip(adapted.items(), grads)}
                query = F.cross_entropy(functional_call(model, adapted, x[4:]), y[4:])
                (query / len(tasks)).backward()
            optimizer.step()
    return audit


# --- reinforcement --------------------------------------------------------------------------------


@odd
def ppo_until_the_policy_has_moved(watch):
    """Epochs over a rollout, in minibatches of two micro-batches. As soon as the divergence is too
    large the author drops the open window and the rest of the epochs."""
    model = network(16, 9)  # eight logits and a value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)

    def learn(states, actions, old, returns, advantages):
        for _ in range(3):
            for rows_of in torch.randperm(64).split(32):
                gain = advantages[rows_of]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                for part, gained in zip(rows_of.split(16), gain.split(16)):
                    *logits, value = model(states[part]).split([8, 1], 1)
                    policy = Categorical(logits=logits[0])
                    ratio = (policy.log_prob(actions[part]) - old[part]).exp()
                    if (ratio - 1 - ratio.log()).mean() > 0.002:
                        optimizer.zero_grad()
                        return
                    surrogate = torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()
                    loss = 0.5 * F.mse_loss(value[:, 0], returns[part]) - surrogate
                    ((loss - 0.01 * policy.entropy().mean()) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    with watch(model, optimizer, windows=6) as audit:
        for update in range(4):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / 4)
            states = torch.randn(64, 16)
            with torch.no_grad():
                out = model(states)
                policy = Categorical(logits=out[:, :8])
                actions = policy.sample()
            returns = (actions == states[:, :8].argmax(1)).float()
            learn(states, actions, policy.log_prob(actions), returns, returns - out[:, 8])
    return audit


@odd
def a2c_summed_over_time(watch):
    """Returns from the end of a rollout; losses are summed over time, as in A3C, and averaged over
    the environments, which have a pass each."""
    model = network(16, 9)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99)
    with watch(model, optimizer) as audit:
        for _ in range(5):
            for environment in range(N):
                out = model(torch.randn(5 + environment, 16))
                policy, values = Categorical(logits=out[:-1, :8]), out[:-1, 8]
                actions = policy.sample()
                returns, running = [], out[-1, 8].item()
                for action in reversed(actions.tolist()):
                    running = float(action == 0) + 0.99 * running
                    returns.insert(0, running)
                advantages = torch.tensor(returns) - values
                loss = -(policy.log_prob(actions) * advantages.detach()).sum()
                loss = loss + 0.5 * advantages.square().sum() - 0.01 * policy.entropy().sum()
                (loss / N).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def drawn(actor: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """Actions of a policy with a normal distribution, and their logarithmic probabilities."""
    mean, deviation = actor(states).chunk(2, 1)
    policy = Normal(mean, F.softplus(deviation) + 0.01)
    actions = policy.rsample()
    return actions, policy.log_prob(actions).sum(1, keepdim=True)


@odd
def sac(watch):
    """Twin critics with a target, an actor whose pass runs through the critics, and a temperature:
    three optimizers, three passes; only the critics' is given."""
    actor, critics = network(16, 4), nn.ModuleList([network(18, 1), network(18, 1)])
    nn.init.normal_(critics[1][0].weight, std=0.1)
    targets, temperature = copy_of(critics), nn.Parameter(torch.zeros(()))
    of_actor, of_critics = adam(actor), adam(critics)
    of_temperature = torch.optim.Adam([temperature], lr=1e-2)

    def worth(of, states, actions):
        return torch.min(*[critic(torch.cat([states, actions], 1)) for critic in of])

    with watch(nn.ModuleList([actor, critics]), of_critics) as audit:
        for x, y in rows(8):
            actions, later = torch.randn(len(x), 2), x.roll(1, 0)
            with torch.no_grad():
                next_actions, likely = drawn(actor, later)
                value = worth(targets, later, next_actions) - temperature.exp() * likely
                target = y[:, None].float() + 0.99 * value
            of_critics.zero_grad()
            both = [F.mse_loss(critic(torch.cat([x, actions], 1)), target) for critic in critics]
            sum(both).backward()
            of_critics.step()
            actions, likely = drawn(actor, x)
            of_actor.zero_grad()
            loss = (temperature.exp().detach() * likely - worth(critics, x, actions)).mean()
            loss.backward()
            of_actor.step()
            of_temperature.zero_grad()
            (-temperature * (likely.detach() - 2).mean()).backward()
            of_temperature.step()
            follow(targets, critics, 0.005)
    return audit


@odd
def dqn(watch):
    """A replay buffer, double Q, a target that is copied every third step, gradients clipped by
    value; the first passes through the buffer train nothing because it is too small."""
    model = network()
    target, optimizer, buffer = copy_of(model), adam(model), []
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows(12)):
            buffer.append((x, y, torch.rand(len(x)), x.roll(1, 0)))
            if len(buffer) < 4:
                continue
            picked = torch.randint(len(buffer), (4,)).tolist()
            states, actions, rewards, later = map(torch.cat, zip(*[buffer[j] for j in picked]))
            with torch.no_grad():
                best = model(later).argmax(1, keepdim=True)
                wanted = rewards + 0.99 * target(later).gather(1, best)[:, 0]
            loss = F.smooth_l1_loss(model(states).gather(1, actions[:, None])[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 100)
            optimizer.step()
            if i % 3 == 0:
                target.load_state_dict(model.state_dict())
    return audit


def of_a_group(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The losses [2, 6] of the tokens of two answers with opposite advantages, and their mask."""
    mask = y != audited.IGNORED
    likely = model(x).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    advantages = torch.tensor([[1.0], [-1.0]])
    return -(likely - likely.detach()).exp() * advantages * mask, mask


@odd
def constant_normaliser_of_tokens(watch, model, optimizer):
    """Dr. GRPO: sums over tokens, divided by the largest length there can be and not by the number
    of tokens there are, so that long answers are not favoured."""
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(audited.tagged(5 * N, labels=(12, 8, 7, 9))):
            losses, _ = of_a_group(model, x, y)
            (losses.sum() / (N * losses.numel())).backward()
            if (i + 1) % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return audit


@odd
def means_of_sequences(watch, model, optimizer):
    """GRPO as published: each answer counts the same, whatever its length, so that the mean over
    its tokens comes first; every micro-batch has two answers."""
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(audited.tagged(5 * N, labels=(12, 8, 7, 9))):
            losses, mask = of_a_group(model, x, y)
            ((losses.sum(1) / mask.sum(1)).mean() / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


# --- without labels -------------------------------------------------------------------------------


@odd
def moco(watch):
    """Keys come from a momentum encoder that moves before every pass, negatives from a queue; the
    label of each row is 0, where its own key stands."""
    model, queue = network(), F.normalize(torch.randn(64, 8))
    keys_of, optimizer = copy_of(model), torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    with watch(model, optimizer) as audit:
        for x, _ in rows(8):
            one, other = two_views(x)
            follow(keys_of, model, 0.001)
            queries, keys = F.normalize(model(one)), F.normalize(keys_of(other))
            own = (queries * keys).sum(1, keepdim=True)
            logits = torch.cat([own, queries @ queue.T], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([keys, queue])[:64]
    return audit


@odd
def byol(watch):
    """Each view predicts the target's projection of the other, in a pass of its own, so that one
    graph is held at a time; the target moves by a schedule, once a step."""
    model = nn.ModuleDict({"encoder": network(), "predictor": network(8, 8)})
    target, optimizer, steps = copy_of(model["encoder"]), adam(model), 5
    with watch(model, optimizer) as audit:
        for step, window in enumerate(audited.windows_of(rows(steps * N))):
            for x, _ in window:
                views = two_views(x)
                for seen, hidden in (views, views[::-1]):
                    predicted = model["predictor"](model["encoder"](seen))
                    (cosine_distance(predicted, target(hidden)) / (2 * N)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            follow(target, model["encoder"], 0.01 * (math.cos(math.pi * step / steps) + 1) / 2)
    return audit


@odd
def dino(watch):
    """A teacher with a centre, many crops, a weight decay that is set at each step, and gradients
    of the last layer that are dropped in the first epoch, to begin calmly."""
    student = network()
    teacher, centre = copy_of(student), torch.zeros(8)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    with watch(student, optimizer, windows=6) as audit:
        for step, (x, _) in enumerate(rows(6)):
            optimizer.param_groups[0]["weight_decay"] = 0.04 + 0.06 * step
            crops = [*two_views(x), *[F.dropout(x, 0.5) for _ in range(4)]]
            told = [teacher(crop) for crop in crops[:2]]
            wanted = [((out - centre) / 0.04).softmax(1) for out in told]
            said = [(student(crop) / 0.1).log_softmax(1) for crop in crops]
            terms = [
                -(w * s).sum(1).mean()
                for i, w in enumerate(wanted)
                for j, s in enumerate(said)
                if i != j
            ]
            optimizer.zero_grad()
            (sum(terms) / len(terms)).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            if step < 3:
                for parameter in student[2].parameters():
                    parameter.grad = None
            optimizer.step()
            follow(teacher, student, 0.004)
            centre = torch.lerp(centre, torch.cat(told).mean(0), 0.1)
    return audit


@odd
def diffusion_of_velocities(watch):
    """v-prediction with a weight for every time (min-SNR), and an average of the parameters that
    moves once a step and not once a micro-batch."""
    model = network(17, 16)
    average, optimizer = copy_of(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as audit:
        for i, (x, _) in enumerate(rows(5 * N)):
            time = torch.rand(len(x), 1) * 0.98 + 0.01
            signal, spread = (time * math.pi / 2).cos(), (time * math.pi / 2).sin()
            noise = torch.randn_like(x)
            predicted = model(torch.cat([signal * x + spread * noise, time], 1))
            losses = (predicted - (signal * noise - spread * x)).square().mean(1, keepdim=True)
            ratio = (signal / spread).square()
            ((ratio.clamp(max=5) / (ratio + 1) * losses).mean() / N).backward()
            if (i + 1) % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                follow(average, model, 0.001)
    return audit


@odd
def annealed_divergence(watch):
    """A VAE whose divergence weighs more from step to step, with free bits; the weight is the same
    throughout a window."""
    model, step = nn.ModuleDict({"encoder": network(16, 8), "decoder": network(4, 16)}), 0
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for i, (x, _) in enumerate(rows(5 * N)):
            mean, log_variance = model["encoder"](x).chunk(2, 1)
            code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            rebuilt = F.mse_loss(model["decoder"](code), x, reduction="sum") / len(x)
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean(0)
            loss = rebuilt + min(1.0, step / 4) * divergence.clamp(min=0.05).sum()
            (loss / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return audit


@odd
def mean_teacher(watch):
    """Labelled rows and, with a weight that is ramped up, rows without labels, a pass each; the
    teacher is the student's average, moves once a step, and is the same for a whole window."""
    student = nn.Sequential(network(16, 32), nn.Dropout(0.2), nn.Linear(32, 8))
    teacher, optimizer = copy_of(student), sgd(student)
    with watch(student, optimizer) as audit:
        for step, window in enumerate(audited.windows_of(rows(5 * N))):
            weight = math.exp(-5 * (1 - min(1, step / 4)) ** 2)
            for x, y in window:
                (of_rows(student, x[:4], y[:4]) / N).backward()
                one, other = two_views(x)
                agreed = F.mse_loss(student(one).softmax(1), teacher(other).softmax(1))
                (weight * agreed / N).backward()
            optimizer.step()
            optimizer.zero_grad()
            follow(teacher, student, max(0.05, 1 / (step + 1)))
    return audit


# --- sequences ------------------------------------------------------------------------------------


@odd
def state_carried_over(watch):
    """A stream in chunks, the state of the LSTM detached between them; a step for each chunk, as
    is usual, so that no gradient reaches over a step."""
    model, state = LanguageModel(), None
    optimizer = sgd(model, lr=1.0)
    with watch(model, optimizer) as audit:
        for tokens, targets in pairs(8):
            logits, state = model(tokens, state)
            optimizer.zero_grad()
            of_tokens(logits, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            state = tuple(part.detach() for part in state)
    return audit


@odd
def chunks_of_a_sequence(watch):
    """Long sequences in chunks with a pass each and one step for the sequence; the author cuts the
    gradient between chunks to save memory, and divides by the tokens of the whole sequence."""
    model = LanguageModel()
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for tokens, targets in pairs(5, length=30):
            state = None
            for x, y in zip(tokens.split(8, 1), targets.split(8, 1)):
                logits, state = model(x, state)
                (of_tokens(logits, y, reduction="sum") / targets.numel()).backward()
                state = tuple(part.detach() for part in state)
            optimizer.step()
            optimizer.zero_grad()
    return audit


@odd
def scheduled_sampling(watch):
    """At each token a coin says whether the decoder is fed the target or its own argmax, more
    often its own from step to step."""
    model, step = Decoder(11), 0
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for i, (targets, hidden) in enumerate(audited.sentences(5 * N, steps=8)):
            token, loss = torch.zeros_like(targets[0]), 0.0
            for target in targets:
                logits, hidden = model(token, hidden)
                loss = loss + F.cross_entropy(logits, target)
                told = torch.rand(len(target)) < 3 / (3 + math.exp(step))
                token = torch.where(told, target, logits.argmax(1))
            (loss / len(targets) / N).backward()
            if (i + 1) % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return audit


@odd
def ctc(watch):
    """CTC of utterances and transcripts of many lengths: the sum, divided by the utterances of the
    window and not by their letters, so that each utterance counts by its likelihood."""
    model, utterances = nn.GRU(8, 11, batch_first=True), 3
    optimizer, loss_of = adam(model), nn.CTCLoss(reduction="sum", zero_infinity=True)
    with watch(model, optimizer) as audit:
        for _ in range(5):
            for _ in range(N):
                frames = torch.randint(8, 13, (utterances,))
                letters = torch.randint(2, 5, (utterances,))
                transcripts = torch.randint(1, 11, (int(letters.sum()),))
                likely = model(torch.randn(utterances, 12, 8))[0].log_softmax(-1).transpose(0, 1)
                (loss_of(likely, transcripts, frames, letters) / (utterances * N)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


@odd
def sequences_that_grow(watch):
    """A curriculum: sequences of 4 tokens, then of 8 and 16, with fewer micro-batches to a window,
    so that a step sees equally many tokens; all of a window are of one length."""
    model = LanguageModel(tied=True)
    optimizer = adam(model)
    with watch(model, optimizer, windows=6) as audit:
        for length, n in ((4, 4), (8, 2), (16, 1)):
            for i, (tokens, targets) in enumerate(pairs(2 * n, length=length)):
                (of_tokens(model(tokens)[0], targets) / n).backward()
                if (i + 1) % n == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return audit


@odd
def reentrant_checkpoints(watch):
    """Segments that are computed again in the backward pass, in the older way, which starts a
    backward pass within the backward pass."""
    model = nn.Sequential(nn.Embedding(11, 16), network(16, 16), network(16, 16), network(16, 11))
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for i, (tokens, targets) in enumerate(pairs(5 * N)):
            hidden = model[0](tokens)
            for segment in model[1:3]:
                hidden = hidden + checkpoint(segment, hidden, use_reentrant=True)
            (of_tokens(model[3](hidden), targets) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@odd
def heads_one_after_another(watch):
    """Multi-token prediction: every head has a pass to a detached copy of the trunk's output, whose
    summed gradient then goes through the trunk; one head's logits are held at a time."""
    model = nn.ModuleDict({"trunk": nn.Sequential(nn.Embedding(11, 16), nn.GRU(16, 16))})
    model["heads"] = nn.ModuleList([nn.Linear(16, 11) for _ in range(3)])
    optimizer = adam(model)
    with watch(model, optimizer) as audit:
        for i, (tokens, targets) in enumerate(pairs(5 * N)):
            output = model["trunk"](tokens.T)[0]
            detached = output.detach().requires_grad_()
            for ahead, head in enumerate(model["heads"]):
                logits = head(detached[: len(output) - ahead])
                (of_tokens(logits, targets.T[ahead:]) / 3 / N).backward()
            output.backward(gradient=detached.grad)
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


# --- several losses -------------------------------------------------------------------------------


@odd
def weights_by_gradient_norms(watch):
    """GradNorm: the weights of two tasks are learned from the norms of their gradients at the last
    shared layer, by an optimizer of their own, and sum up to 2."""
    model = nn.ModuleDict({"trunk": network(16, 16), "a": network(16, 8), "b": network(16, 16)})
    weights, first = nn.Parameter(torch.ones(2)), None
    optimizer, of_weights = adam(model), torch.optim.Adam([weights], lr=0.025)
    shared = model["trunk"][2].weight
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            features = model["trunk"](x)
            losses = F.cross_entropy(model["a"](features), y), F.mse_loss(model["b"](features), x)
            first = first or [loss.item() for loss in losses]
            optimizer.zero_grad()
            sum(w * loss for w, loss in zip(weights.detach(), losses)).backward(retain_graph=True)
            norms = torch.stack(
                [slopes(w * loss, shared).norm() for w, loss in zip(weights, losses)]
            )
            pace = torch.tensor([loss.item() / start for loss, start in zip(losses, first)])
            wanted = norms.mean().detach() * (pace / pace.mean()) ** 1.5
            (weights.grad,) = torch.autograd.grad((norms - wanted).abs().sum(), weights)
            of_weights.step()
            optimizer.step()
            weights.data.mul_(2 / weights.data.sum())
    return audit


@odd
def class_weights_of_a_window(watch, model, optimizer):
    """Rare classes weigh more; the sum is divided by the weights of all rows of the window, so that
    a row counts the same in whichever micro-batch it is."""
    weight = torch.linspace(0.5, 4.0, 8)
    with watch(model, optimizer) as audit:
        for window in audited.windows_of(rows(5 * N)):
            total = sum(weight[y].sum() for _, y in window)
            for x, y in window:
                loss = F.cross_entropy(model(x), y, weight=weight, reduction="sum")
                (loss / total).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


@odd
def data_sets_in_turn(watch):
    """Three data sets in turn, heads and losses of their own, a weight for each; all losses go
    through one helper, and a step comes after one batch of each."""
    trunk = network(16, 32)
    heads = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 16), nn.Linear(32, 1)])
    model = nn.ModuleList([trunk, heads])
    optimizer = adam(model)
    losses = [
        lambda out, x, y: F.cross_entropy(out, y),
        lambda out, x, y: F.mse_loss(out, x),
        lambda out, x, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 3).float()),
    ]
    loaders = [itertools.cycle(rows(3 + k)) for k in range(3)]

    def backward(loss):
        loss.backward()

    with watch(model, optimizer) as audit:
        for i in range(5 * 3):
            k = i % 3
            x, y = next(loaders[k])
            backward((1.0, 0.5, 0.25)[k] * losses[k](heads[k](trunk(x)), x, y))
            if k == 2:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@odd
def elastic_weights(watch, model, optimizer):
    """EWC: first passes that only measure how much each parameter matters, without a step; then
    training, where the penalty has one pass per window, and is therefore not divided."""
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    with watch(model, optimizer) as audit:
        for x, y in rows(6):
            model.zero_grad()
            of_rows(model, x, y).backward()
            for total, parameter in zip(fisher, model.parameters()):
                total += parameter.grad.square() / 6
        model.zero_grad()
        old = [p.detach().clone() for p in model.parameters()]
        for window in audited.windows_of(rows(5 * N)):
            for x, y in window:
                (of_rows(model, x.flip(1), y) / N).backward()
            moved = zip(fisher, model.parameters(), old)
            (50 * sum((f * (p - before).square()).sum() for f, p, before in moved)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


@odd
def dark_replay(watch, model, optimizer):
    """DER++: rows met before are replayed with the logits that they had then, and others with their
    labels; a weight for each, a pass for each, and none as long as nothing is stored."""
    buffer = []
    with watch(model, optimizer) as audit:
        for x, y in rows(8):
            optimizer.zero_grad()
            logits = model(x)
            F.cross_entropy(logits, y).backward()
            if buffer:
                seen, _, then = buffer[torch.randint(len(buffer), ())]
                (0.5 * F.mse_loss(model(seen), then)).backward()
                seen, label, _ = buffer[torch.randint(len(buffer), ())]
                (0.5 * of_rows(model, seen, label)).backward()
            optimizer.step()
            buffer.append((x, y, logits.detach()))
    return audit


@odd
def physics_with_two_optimizers(watch):
    """A network that solves u' = -u: derivatives for the input in the loss, Adam at first and
    L-BFGS afterwards, on the same parameters."""
    model = network(1, 1)
    first = adam(model)
    second = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    times = torch.linspace(0, 2, 16)[:, None].requires_grad_()

    def closure():
        model.zero_grad()
        solution = model(times)
        residual = (slopes(solution, times) + solution).square().mean()
        loss = residual + 10 * (model(torch.zeros(1, 1)) - 1).square().sum()
        loss.backward()
        return loss

    with watch(model, first, windows=10) as audit:
        for _ in range(8):
            closure()
            first.step()
        for _ in range(3):
            second.step(closure)
    return audit


# --- optimizers and parameters --------------------------------------------------------------------


@odd
def adapter_in_a_frozen_backbone(watch):
    """Fine-tuning of an adapter and a head; `model.train()` turns on dropout, and the frozen
    BatchNorm is put back to eval, so that its statistics stay those of the pretraining."""
    backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
    adapter, head = network(32, 32), nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 8))
    nn.init.zeros_(adapter[2].weight)
    model = nn.ModuleList([backbone, adapter, head])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with watch(model, optimizer) as audit:
        model.train()
        backbone[1].eval()
        for i, (x, y) in enumerate(rows(5 * N)):
            features = backbone(x)
            (F.cross_entropy(head(features + adapter(features)), y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@odd
def thawed_from_the_top(watch):
    """ULMFiT: rates that fall from layer to layer, no decay of biases, a warm-up by LambdaLR, and a
    layer more that is thawed in every epoch; the optimizer has all of them from the start."""
    model = nn.Sequential(network(16, 32), network(32, 32), nn.Linear(32, 8))
    groups = [
        {
            "params": [p for p in layer.parameters() if (p.ndim == 2) == decayed],
            "lr": 1e-2 * 0.4 ** (2 - depth),
            "weight_decay": 0.01 * decayed,
        }
        for depth, layer in enumerate(model)
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    with watch(model, optimizer, windows=6) as audit:
        for epoch in range(3):
            for depth, layer in enumerate(model):
                layer.requires_grad_(depth >= 2 - epoch)
            for i, (x, y) in enumerate(rows(2 * N)):
                (of_rows(model, x, y) / N).backward()
                if (i + 1) % N == 0:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
    return audit


class Lookahead(torch.optim.Optimizer):
    """After every k steps of the inner optimizer, half way back to where they began."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for parameter, start in zip(group["params"], slow):
                    start.lerp_(parameter, self.alpha)
                    parameter.copy_(start)
        return loss


@odd
def lookahead(watch):
    """An optimizer written by hand around one of torch, which moves parameters after the steps."""
    model = network()
    optimizer = Lookahead(adam(model))
    return audited.train(watch, model, optimizer, rows(5 * N))


@odd
def sparse_and_dense(watch):
    """SparseAdam for the embedding, whose gradient is sparse, and Adam for the rest: two optimizers
    of one model that step together."""
    model = LanguageModel(sparse=True)
    table = list(model.embedding.parameters())
    sparse = torch.optim.SparseAdam(table, lr=1e-2)
    dense = torch.optim.Adam([p for p in model.parameters() if p is not table[0]], lr=1e-3)
    with watch(model, dense) as audit:
        for i, (tokens, targets) in enumerate(pairs(5 * N)):
            (of_tokens(model(tokens)[0], targets) / N).backward()
            if (i + 1) % N == 0:
                for optimizer in (sparse, dense):
                    optimizer.step()
                    optimizer.zero_grad()
    return audit


@odd
def centred_gradients(watch, model, optimizer):
    """Hooks take the mean off every row of a weight's gradient, in each pass, which is the same as
    off their sum; norms are logged by a clip that never clips; gradients are cleared first."""
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    norms = []
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows(5 * N)):
            if i % N == 0:
                optimizer.zero_grad()
            (of_rows(model, x, y) / N).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("inf")))
            if i % N == N - 1:
                optimizer.step()
    return audit


# --- mixed precision, schedules and epochs --------------------------------------------------------


@odd
def schedule_that_waits_for_the_scaler(watch):
    """The GradScaler skips the first steps and another; the schedule steps only if the
    scale did not fall, which is how one sees that the optimizer did step."""
    model, scaler = network(), scaler_of(init_scale=2.0**23)
    optimizer = adam(model)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with watch(model, optimizer, windows=8) as audit:
        for i, (x, y) in enumerate(rows(8 * N)):
            with torch.autocast("cpu", torch.float16):
                loss = of_rows(model, x, y)
            scaler.scale(loss / N).backward()
            if (i + 1) % N == 0:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    schedule.step()
                optimizer.zero_grad()
    return audit


@odd
def scaler_of_two_optimizers(watch):
    """An encoder and a decoder with an optimizer and a clip each, one loss and one scaler: both are
    unscaled, clipped by their own norms and stepped before the one update."""
    model = nn.ModuleDict({"encoder": network(16, 4), "decoder": network(4, 16)})
    optimizers = {"encoder": adam(model["encoder"]), "decoder": sgd(model["decoder"])}
    scaler = scaler_of(growth_interval=2)
    with watch(model, optimizers["encoder"]) as audit:
        for i, (x, _) in enumerate(rows(5 * N)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model["decoder"](model["encoder"](x)).float(), x)
            scaler.scale(loss / N).backward()
            if (i + 1) % N == 0:
                for (name, optimizer), norm in zip(optimizers.items(), (0.01, 0.1)):
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model[name].parameters(), norm)
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
    return audit


@odd
def best_of_a_plateau(watch):
    """Validation in eval mode after every step, the rate lowered when its loss does not fall, and
    the best parameters loaded at the end."""
    model = nn.Sequential(network(16, 32), nn.Dropout(0.2), nn.Linear(32, 8))
    optimizer, held_out = sgd(model, lr=2.0), rows(6 * N + 2)[-2:]
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best, kept = math.inf, model.state_dict()
    with watch(model, optimizer) as audit:
        for window in audited.windows_of(rows(6 * N)):
            model.train()
            for x, y in window:
                (of_rows(model, x, y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                loss = sum(of_rows(model, x, y).item() for x, y in held_out) / len(held_out)
            schedule.step(loss)
            if loss < best:
                best, kept = loss, copy.deepcopy(model.state_dict())
        model.load_state_dict(kept)
    return audit


@odd
def resumed(watch, model, optimizer):
    """From the middle of an epoch: batches that were seen are skipped, and a schedule that was not
    saved is stepped to where it was, before any step of the optimizer."""
    done = 3
    with watch(model, optimizer) as audit:
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no step came first
            for _ in range(done):
                schedule.step()
        for i, (x, y) in enumerate(rows(8 * N)):
            if i < done * N:
                continue
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return audit


@odd
def guarded_against_nan(watch, model, optimizer):
    """A micro-batch whose loss is not finite has no pass and does not count; a window is full when
    it has four that are."""
    good = 0
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows(7 * N)):
            loss = of_rows(model, x * float("nan") if i % 7 == 3 else x, y)
            if not torch.isfinite(loss):
                continue
            (loss / N).backward()
            good += 1
            if good % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


class Trainer:
    """Takes steps after `n` micro-batches; what an epoch leaves open it drops."""

    def __init__(self, model, optimizer, schedule, n):
        self.model, self.optimizer, self.schedule, self.n = model, optimizer, schedule, n

    def train_step(self, batch):
        loss = of_rows(self.model, *batch)
        (loss / self.n).backward()
        return loss.detach()

    def train_epoch(self, batches):
        self.model.train()
        self.optimizer.zero_grad()  # what the last epoch left open
        total = torch.zeros(())
        for i, batch in enumerate(batches, start=1):
            total += self.train_step(batch)
            if i % self.n == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.schedule.step()
        return total.item() / len(batches)


@odd
def trainer_that_drops_the_rest(watch, model, optimizer):
    """A class that trains; ten micro-batches an epoch, windows of four, and the two that are left
    are dropped on purpose by `zero_grad`, like `drop_last`."""
    trainer = Trainer(model, optimizer, lr_scheduler.StepLR(optimizer, 1, gamma=0.5), N)
    with watch(model, optimizer, windows=6) as audit:
        for _ in range(3):
            trainer.train_epoch(rows(2 * N + 2))
    return audit


@odd
def rest_divided_by_what_it_holds(watch, model, optimizer):
    """Ten micro-batches an epoch; the last two make a window of their own and are divided by two;
    the schedule steps once an epoch."""
    schedule, batches = lr_scheduler.ExponentialLR(optimizer, 0.9), rows(2 * N + 2)
    with watch(model, optimizer, windows=9) as audit:
        for _ in range(3):
            for i, (x, y) in enumerate(batches):
                held = min(N, len(batches) - i // N * N)
                (of_rows(model, x, y) / held).backward()
                if (i + 1) % N == 0 or i + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
            schedule.step()
    return audit


# What may be meant is asked: here it is.
ASKED: dict[Looping, set[str]] = {
    ppo_until_the_policy_has_moved: {"accumulation.dropped"},
    scheduled_sampling: {"memory.graph"},
    heads_one_after_another: {"accumulation.unequal_counts"},
    physics_with_two_optimizers: {"parameters.twice"},
    resumed: {"schedule.before_first_step"},
    trainer_that_drops_the_rest: {"accumulation.dropped"},
}
