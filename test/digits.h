// The experiment behind "averaging gradients over ranks equals training on the whole batch": the
// UCI digits (test/data/README.md) and a small network that is trained on them by full batches.
//
// The claim is about the average, so nothing else may blur it: the activation is smooth, every
// element of a gradient is summed over the samples in double and rounded to f32 once, and losses
// are sums in double. What then differs between one process and several is the rounding of the
// average itself.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ringfold::test {

inline constexpr int kPixels = 64;
inline constexpr int kClasses = 10;
inline constexpr int kDigits = 1797;

struct Digit {
  std::array<double, kPixels> pixels;  // 0 to 1
  int label;                           // 0 to 9
};

// All samples in the order of the file. Throws std::runtime_error if the file is not what
// test/data/README.md describes.
inline std::vector<Digit> load_digits(const std::string& path = RINGFOLD_TEST_DATA "/digits.bin") {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() != size_t{kDigits} * (kPixels + 1)) {
    throw std::runtime_error(fmt::format("{}: {} bytes, expected {}", path, bytes.size(),
                                         size_t{kDigits} * (kPixels + 1)));
  }
  std::vector<Digit> digits(kDigits);
  auto byte = bytes.begin();
  for (Digit& digit : digits) {
    for (double& pixel : digit.pixels) {
      if (*byte < 0 || *byte > 16) throw std::runtime_error(path + ": a pixel is not in 0..16");
      pixel = *byte++ / 16.0;
    }
    digit.label = *byte++;
    if (digit.label < 0 || digit.label >= kClasses) {
      throw std::runtime_error(path + ": a label is not in 0..9");
    }
  }
  return digits;
}

// What a pass over some samples found, before any parameter changed.
struct Evaluation {
  double loss_sum = 0;  // cross entropy, summed over the samples
  int correct = 0;      // samples whose most likely class is their label
};

// 64 inputs, 32 tanh units, 10 classes by softmax; momentum 0.9. Parameters and gradients are f32,
// each in one contiguous buffer.
class DigitsNetwork {
 public:
  static constexpr int kHidden = 32;
  static constexpr int kTensors = 4;  // hidden weights, hidden biases, output weights and biases
  static constexpr std::array<size_t, kTensors> kCounts = {kPixels * kHidden, kHidden,
                                                           kHidden* kClasses, kClasses};
  static constexpr std::array<size_t, kTensors> kBegins = {0, kCounts[0], kCounts[0] + kCounts[1],
                                                           kCounts[0] + kCounts[1] + kCounts[2]};
  static constexpr size_t kParameters = kBegins[3] + kCounts[3];
  static constexpr double kLearningRate = 0.25;
  static constexpr double kMomentum = 0.9;

  // The same parameters for the same seed, on every machine: the generator is specified by the
  // standard, and no distribution of the standard library, which is not, is used.
  explicit DigitsNetwork(uint32_t seed)
      : parameters_(kParameters), gradients_(kParameters), velocity_(kParameters) {
    std::mt19937 random(seed);
    const auto fill = [&](int tensor, int inputs) {
      const double bound = std::sqrt(3.0 / inputs);  // variance 1 / inputs
      for (float& weight : view(parameters(), tensor)) {
        weight = static_cast<float>((random() / 2147483648.0 - 1.0) * bound);
      }
    };
    fill(0, kPixels);
    fill(2, kHidden);
  }

  [[nodiscard]] std::span<float> parameters() { return parameters_; }
  [[nodiscard]] std::span<const float> parameters() const { return parameters_; }
  [[nodiscard]] std::span<float> gradients() { return gradients_; }
  [[nodiscard]] std::span<float> gradient(int tensor) { return view(gradients(), tensor); }

  // Sets gradients() to the mean over `samples` of the gradient of the loss. Of no samples the
  // mean is undefined: every element becomes NaN, so that nobody uses it unnoticed.
  Evaluation compute_gradients(std::span<const Digit> samples) {
    std::vector<double> sums(kParameters);
    Evaluation all;
    for (const Digit& sample : samples) add_gradient(sample, sums, &all);
    for (size_t i = 0; i < kParameters; ++i) {
      gradients_[i] = samples.empty()
                          ? std::numeric_limits<float>::quiet_NaN()
                          : static_cast<float>(sums[i] / static_cast<double>(samples.size()));
    }
    return all;
  }

  [[nodiscard]] Evaluation evaluate(std::span<const Digit> samples) const {
    Evaluation all;
    for (const Digit& sample : samples) record(forward(sample), sample.label, &all);
    return all;
  }

  // One step of gradient descent with gradients().
  void step() {
    for (size_t i = 0; i < kParameters; ++i) {
      velocity_[i] = static_cast<float>(kMomentum * velocity_[i] + gradients_[i]);
      parameters_[i] = static_cast<float>(parameters_[i] - kLearningRate * velocity_[i]);
    }
  }

 private:
  struct Activations {
    std::array<double, kHidden> hidden{};
    std::array<double, kClasses> probability{};
  };

  template <class T>
  static std::span<T> view(std::span<T> buffer, int tensor) {
    return buffer.subspan(kBegins[static_cast<size_t>(tensor)],
                          kCounts[static_cast<size_t>(tensor)]);
  }

  [[nodiscard]] Activations forward(const Digit& sample) const {
    Activations a;
    const std::span<const float> weights = view(parameters(), 0),
                                 out_weights = view(parameters(), 2);
    std::ranges::copy(view(parameters(), 1), a.hidden.begin());
    for (size_t i = 0; i < kPixels; ++i) {
      const double pixel = sample.pixels[i];
      if (pixel == 0) continue;  // every other one: this is where the time goes
      const float* row = &weights[i * kHidden];
      for (size_t h = 0; h < kHidden; ++h) a.hidden[h] += pixel * row[h];
    }
    for (double& h : a.hidden) h = std::tanh(h);
    std::ranges::copy(view(parameters(), 3), a.probability.begin());
    for (size_t h = 0; h < kHidden; ++h) {
      for (size_t c = 0; c < kClasses; ++c) {
        a.probability[c] += a.hidden[h] * out_weights[h * kClasses + c];
      }
    }
    softmax(&a.probability);
    return a;
  }

  static void softmax(std::array<double, kClasses>* scores) {
    const double highest = *std::ranges::max_element(*scores);
    double total = 0;
    for (double& score : *scores) total += score = std::exp(score - highest);
    for (double& score : *scores) score /= total;
  }

  static void record(const Activations& a, int label, Evaluation* all) {
    all->loss_sum -= std::log(a.probability[static_cast<size_t>(label)]);
    const auto best = std::ranges::max_element(a.probability) - a.probability.begin();
    all->correct += best == label ? 1 : 0;
  }

  void add_gradient(const Digit& sample, std::span<double> sums, Evaluation* all) const {
    const auto weights = view(sums, 0), biases = view(sums, 1);
    const auto out_sums = view(sums, 2), out_biases = view(sums, 3);
    const Activations a = forward(sample);
    record(a, sample.label, all);
    std::array<double, kClasses> out = a.probability;  // d loss / d score
    out[static_cast<size_t>(sample.label)] -= 1;
    const std::span<const float> out_weights = view(parameters(), 2);
    std::array<double, kHidden> hidden{};  // d loss / d input of the hidden unit
    for (size_t h = 0; h < kHidden; ++h) {
      double back = 0;
      for (size_t c = 0; c < kClasses; ++c) {
        out_sums[h * kClasses + c] += a.hidden[h] * out[c];
        back += out_weights[h * kClasses + c] * out[c];
      }
      hidden[h] = back * (1 - a.hidden[h] * a.hidden[h]);
    }
    for (size_t c = 0; c < kClasses; ++c) out_biases[c] += out[c];
    for (size_t h = 0; h < kHidden; ++h) biases[h] += hidden[h];
    for (size_t i = 0; i < kPixels; ++i) {
      const double pixel = sample.pixels[i];
      if (pixel == 0) continue;
      double* row = &weights[i * kHidden];
      for (size_t h = 0; h < kHidden; ++h) row[h] += pixel * hidden[h];
    }
  }

  std::vector<float> parameters_, gradients_, velocity_;
};

}  // namespace ringfold::test
